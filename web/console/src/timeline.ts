/** A run as bars over time, one for each round, call and wait. */

import type { RunEventJson } from "@pawl/client";

import { objectOf } from "./sentence";

/** A part of a call: waiting for a person, running, or a failed attempt. Without an end it is still open. */
export interface Part {
  kind: "idle" | "wait" | "run" | "bad";
  start: number;
  end?: number;
}

export interface Bar {
  id: string;
  name: string;
  /** The main arguments of a call. */
  of?: string;
  kind: "round" | "call" | "wait" | "retry" | "takeover";
  start: number; // Milliseconds since the epoch. Without an end it is still open.
  end?: number;
  note: string; // State or outcome, and the number of attempts.
  bad?: boolean; // True for a call that failed or whose outcome is unknown.
  parts?: Part[]; // Parts of a call.
  depth: 0 | 1; // Bars of calls and waits are below the bar of their round.
  childRunId?: string;
}

export interface Timeline {
  bars: Bar[];
  attempt: string;
  wait: string; // The open wait.
  hasRounds: boolean; // True if the run has rounds. Calls are then below the bar of their round.
  byId?: Map<string, Bar>;
}

export const NO_BARS: Timeline = { bars: [], attempt: "", wait: "", hasRounds: false };

const BAD = /_(FAILED|REJECTED|EXPIRED|OUTCOME_UNKNOWN)$/;
const SETTLED = /_(SUCCEEDED|FAILED|REJECTED|EXPIRED|CANCELLED|DETACHED)$/;
const ENDED = /_(COMPLETED|FAILED|CANCELLED|EXPIRED)$/;
const WAITS = /_(AWAITING_APPROVAL|ASKED|OFFERED)$/;

export function lay(before: Timeline, events: RunEventJson[]): Timeline {
  let { attempt, wait, hasRounds } = before;
  // A long run has thousands of bars, which are not copied for each event.
  const bars = before.byId ?? new Map<string, Bar>();
  const start = (id: string, bar: Omit<Bar, "id" | "depth">): void => void (bars.has(id) || bars.set(id, { id, depth: hasRounds && bar.kind !== "round" ? 1 : 0, ...bar }));
  const change = (id: string, to: Partial<Bar>): void => {
    const bar = bars.get(id);
    if (bar && bar.end === undefined) bars.set(id, { ...bar, ...to });
  };
  for (const event of events) {
    const at = Date.parse(event.time ?? "");
    if (Number.isNaN(at)) continue;
    // Each worker increments the attempt. After a wait that is a normal continuation.
    const now = event.attempt ?? "";
    if (now && attempt && now !== attempt && !wait) start(`takeover ${now}`, { name: "Taken over", kind: "takeover", start: at, end: at, note: `by attempt ${now}` });
    attempt = now || attempt;
    if (event.roundStarted) {
      const { round = 0, modelAttempt = 1, model = "" } = event.roundStarted;
      hasRounds = true;
      start(`round ${round}`, { name: `Round ${round}`, kind: "round", start: at, note: model });
      if (modelAttempt > 1) change(`round ${round}`, { note: `${model}, ${modelAttempt} attempts` });
    } else if (event.roundEnded) change(`round ${event.roundEnded.round ?? 0}`, { end: at });
    else if (event.roundRetrying) {
      const { round = 0, reason = "", delaySeconds = 0 } = event.roundRetrying;
      const end = at + Number(delaySeconds) * 1000;
      start(`retry ${event.seq}`, { name: `Retry of round ${round}`, kind: "retry", start: at, end, note: reason });
    } else if (event.callChanged?.call) {
      const { callId = "", toolName = "", state = "", attempt: tries = 1, childRunId } = event.callChanged.call;
      start(callId, { name: toolName, of: objectOf(event.callChanged.call), kind: "call", start: at, note: "", parts: [] });
      const isSettled = SETTLED.test(state);
      const note = `${state.replace("CALL_STATE_", "").toLowerCase().replaceAll("_", " ")}${tries > 1 ? `, attempt ${tries}` : ""}`;
      const again = tries > triesOf(bars.get(callId)?.note);
      change(callId, { note, bad: BAD.test(state), parts: after(bars.get(callId)?.parts ?? [], state, at, again), ...(childRunId ? { childRunId } : {}), ...(isSettled ? { end: at } : {}) });
    } else if (event.runChanged?.run) {
      const { state = "", waiting, waits = [], failure } = event.runChanged.run;
      if (state === "RUN_STATE_WAITING") {
        if (!wait) start((wait = `wait ${event.seq}`), { name: "Waiting", kind: "wait", start: at, note: waiting?.sentence ?? waits.map((kind) => kind.replace("WAIT_KIND_", "").toLowerCase().replaceAll("_", " ")).join(", ") });
      } else if (wait) {
        change(wait, { end: at });
        wait = "";
      }
      if (ENDED.test(state)) for (const id of bars.keys()) change(id, { end: at, ...(failure && id.startsWith("round") ? { bad: true, note: failure.message ?? "" } : {}) });
    }
  }
  return { bars: [...bars.values()], attempt, wait, hasRounds, byId: bars };
}

const triesOf = (note = ""): number => Number(/attempt (\d+)$/.exec(note)?.[1] ?? 1);

/** Returns the parts of a call after a change of its state. A new attempt follows a failed attempt. */
function after(parts: Part[], state: string, at: number, again: boolean): Part[] {
  const last = parts.at(-1);
  const isSettled = SETTLED.test(state);
  const kind = WAITS.test(state) ? "wait" : /_(RUNNING|OUTCOME_UNKNOWN)$/.test(state) ? "run" : "idle";
  if (last && !isSettled && !again && last.kind === kind) return parts;
  const closed = last && last.end === undefined ? [...parts.slice(0, -1), { ...last, end: at, kind: again || (isSettled && BAD.test(state)) ? "bad" : last.kind } as Part] : parts;
  return isSettled ? closed : [...closed, { kind, start: at }];
}
