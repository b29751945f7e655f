/** A run as bars over time, one for each round, call and wait. */

import type { RunEventJson } from "@pawl/client";

export interface Bar {
  id: string;
  name: string;
  kind: "round" | "call" | "wait" | "retry" | "takeover";
  /** Milliseconds since the epoch. Without an end it is still open. */
  start: number;
  end?: number;
  /** State or outcome, and the number of attempts. */
  note: string;
  /** True for a call that failed or whose outcome is unknown. */
  bad?: boolean;
}

export interface Timeline {
  bars: Bar[];
  attempt: string;
}

export const NO_BARS: Timeline = { bars: [], attempt: "" };

const BAD = /_(FAILED|REJECTED|EXPIRED|OUTCOME_UNKNOWN)$/;
const SETTLED = /_(SUCCEEDED|FAILED|REJECTED|EXPIRED|CANCELLED|DETACHED)$/;
const ENDED = /_(COMPLETED|FAILED|CANCELLED|EXPIRED)$/;

/** Returns the timeline after new events. */
export function lay(before: Timeline, events: RunEventJson[]): Timeline {
  let { attempt } = before;
  const bars = new Map(before.bars.map((bar) => [bar.id, bar]));
  const start = (id: string, bar: Omit<Bar, "id">): void => void (bars.has(id) || bars.set(id, { id, ...bar }));
  const change = (id: string, to: Partial<Bar>): void => {
    const bar = bars.get(id);
    if (bar && bar.end === undefined) bars.set(id, { ...bar, ...to });
  };
  for (const event of events) {
    const at = Date.parse(event.time ?? "");
    if (Number.isNaN(at)) continue;
    // Each worker increments the attempt. After a wait that is a normal continuation.
    const now = event.attempt ?? "";
    const waits = [...bars.values()].findLast(({ kind, end }) => kind === "wait" && end === undefined);
    if (now && attempt && now !== attempt && !waits) start(`takeover ${now}`, { name: "Taken over", kind: "takeover", start: at, end: at, note: `by attempt ${now}` });
    attempt = now || attempt;
    if (event.roundStarted) {
      const { round = 0, modelAttempt = 1, model = "" } = event.roundStarted;
      start(`round ${round}`, { name: `Round ${round}`, kind: "round", start: at, note: model });
      if (modelAttempt > 1) change(`round ${round}`, { note: `${model}, ${modelAttempt} attempts` });
    } else if (event.roundEnded) change(`round ${event.roundEnded.round ?? 0}`, { end: at });
    else if (event.roundRetrying) {
      const { round = 0, reason = "", delaySeconds = 0 } = event.roundRetrying;
      const end = at + Number(delaySeconds) * 1000;
      start(`retry ${event.seq}`, { name: `Retry of round ${round}`, kind: "retry", start: at, end, note: reason });
    } else if (event.callChanged?.call) {
      const { callId = "", toolName = "", state = "", attempt: tries = 1 } = event.callChanged.call;
      start(callId, { name: toolName, kind: "call", start: at, note: "" });
      const note = `${state.replace("CALL_STATE_", "").toLowerCase().replaceAll("_", " ")}${tries > 1 ? `, attempt ${tries}` : ""}`;
      change(callId, { note, bad: BAD.test(state), ...(SETTLED.test(state) ? { end: at } : {}) });
    } else if (event.runChanged?.run) {
      const { state = "", waiting } = event.runChanged.run;
      if (state === "RUN_STATE_WAITING") {
        if (!waits) start(`wait ${event.seq}`, { name: "Waiting", kind: "wait", start: at, note: waiting?.sentence ?? "" });
      } else if (waits) change(waits.id, { end: at });
      if (ENDED.test(state)) for (const id of bars.keys()) change(id, { end: at });
    }
  }
  return { bars: [...bars.values()], attempt };
}
