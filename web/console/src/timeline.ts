/** A run as bars over time: its rounds, its calls, what it waited for; the events of one thing are one bar. */

import type { RunEventJson } from "@pawl/client";

export interface Bar {
  id: string;
  name: string;
  kind: "round" | "call" | "wait" | "retry" | "takeover";
  /** Milliseconds since the epoch; without an end it goes on. */
  begin: number;
  end?: number;
  /** How it stands, or ended; how often a model was asked. */
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

/** Returns the timeline with events more, each of which is new. */
export function lay(before: Timeline, events: RunEventJson[]): Timeline {
  let { attempt } = before;
  const bars = new Map(before.bars.map((bar) => [bar.id, bar]));
  const begin = (id: string, bar: Omit<Bar, "id">): void => void (bars.has(id) || bars.set(id, { id, ...bar }));
  const change = (id: string, to: Partial<Bar>): void => {
    const bar = bars.get(id);
    if (bar && bar.end === undefined) bars.set(id, { ...bar, ...to });
  };
  for (const event of events) {
    const at = Date.parse(event.time ?? "");
    if (Number.isNaN(at)) continue;
    // Each worker that takes the run counts its attempt up: after a wait that is nothing but going on.
    const now = event.attempt ?? "";
    const waits = [...bars.values()].findLast(({ kind, end }) => kind === "wait" && end === undefined);
    if (now && attempt && now !== attempt && !waits) begin(`takeover ${now}`, { name: "Taken over", kind: "takeover", begin: at, end: at, note: `by attempt ${now}` });
    attempt = now || attempt;
    if (event.roundStarted) {
      const { round = 0, modelAttempt = 1, model = "" } = event.roundStarted;
      begin(`round ${round}`, { name: `Round ${round}`, kind: "round", begin: at, note: model });
      if (modelAttempt > 1) change(`round ${round}`, { note: `${model}, asked ${modelAttempt} times` });
    } else if (event.roundEnded) change(`round ${event.roundEnded.round ?? 0}`, { end: at });
    else if (event.roundRetrying) {
      const { round = 0, reason = "", delaySeconds = 0 } = event.roundRetrying;
      const end = at + Number(delaySeconds) * 1000;
      begin(`retry ${event.seq}`, { name: `Round ${round} again`, kind: "retry", begin: at, end, note: reason });
    } else if (event.callChanged?.call) {
      const { callId = "", toolName = "", state = "", attempt: tries = 1 } = event.callChanged.call;
      begin(callId, { name: toolName, kind: "call", begin: at, note: "" });
      const note = `${state.replace("CALL_STATE_", "").toLowerCase().replaceAll("_", " ")}${tries > 1 ? `, attempt ${tries}` : ""}`;
      change(callId, { note, bad: BAD.test(state), ...(SETTLED.test(state) ? { end: at } : {}) });
    } else if (event.runChanged?.run) {
      const { state = "", waiting } = event.runChanged.run;
      if (state === "RUN_STATE_WAITING") {
        if (!waits) begin(`wait ${event.seq}`, { name: "Waits", kind: "wait", begin: at, note: waiting?.sentence ?? "" });
      } else if (waits) change(waits.id, { end: at });
      if (ENDED.test(state)) for (const id of bars.keys()) change(id, { end: at });
    }
  }
  return { bars: [...bars.values()], attempt };
}
