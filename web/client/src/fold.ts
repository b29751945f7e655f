import type { CallJson } from "../gen/pawl/event/v1/call_pb";
import type { RunEventJson, WarningJson } from "../gen/pawl/event/v1/event_pb";
import type { GapJson } from "../gen/pawl/event/v1/gap_pb";
import type { RunJson } from "../gen/pawl/event/v1/run_pb";

/** What the model has said in a round, and the calls of it. */
export interface RoundView {
  round: number;
  attempt: number;
  model: string;
  text: string;
  reasoning: string;
  /** Calls that are being written; those that are known are in `callIds`. */
  drafts: { toolName: string; arguments: string }[];
  callIds: string[];
  done: boolean;
}

export interface RetryView {
  round: number;
  reason: string;
  message: string;
  delaySeconds: number;
}

export interface Progress {
  fraction?: number;
  message: string;
}

/** A run as its log tells it. Folding the same events again changes nothing. */
export interface RunView {
  run: RunJson;
  seq: number;
  rounds: RoundView[];
  calls: Record<string, CallJson>;
  progress: Record<string, Progress>;
  warnings: WarningJson[];
  retries: RetryView[];
  /** True if the log does not begin at its first event: what came before stands in `run`. */
  gap: boolean;
  ended: boolean;
}

const ENDED = new Set(["RUN_STATE_COMPLETED", "RUN_STATE_FAILED", "RUN_STATE_CANCELLED", "RUN_STATE_EXPIRED"]);

export function emptyView(run: RunJson): RunView {
  return {
    run,
    seq: 0,
    rounds: [],
    calls: {},
    progress: {},
    warnings: [],
    retries: [],
    gap: false,
    ended: isEnded(run),
  };
}

export function isEnded(run: RunJson): boolean {
  return ENDED.has(run.state ?? "");
}

/**
 * Returns the view with an event more. An event that it has already is left out; an attempt of the model that was void is
 * taken back, so text never stands twice.
 */
export function fold(view: RunView, event: RunEventJson): RunView {
  const seq = Number(event.seq ?? 0);
  if (seq <= view.seq) return view;
  const next = { ...view, seq };
  if (event.runChanged?.run) {
    next.run = event.runChanged.run;
    next.ended = isEnded(next.run);
  } else if (event.roundStarted) {
    const { round = 0, modelAttempt = 0, model = "" } = event.roundStarted;
    const begun = { round, attempt: modelAttempt, model, text: "", reasoning: "", drafts: [], callIds: [], done: false };
    next.rounds = [...view.rounds.filter((each) => each.round !== round), begun];
  } else if (event.roundRetrying) {
    const { round = 0, reason = "", message = "", delaySeconds = 0 } = event.roundRetrying;
    next.retries = [...view.retries, { round, reason, message, delaySeconds: Number(delaySeconds) }];
    next.rounds = view.rounds.map((each) =>
      each.round === round ? { ...each, text: "", reasoning: "", drafts: [] } : each,
    );
  } else if (event.outputDelta) {
    const { round = 0, text = "", reasoning = "", refusal = "", calls = [] } = event.outputDelta;
    next.rounds = changed(view.rounds, round, (each) => {
      const drafts = calls.length ? [...each.drafts] : each.drafts;
      for (const { index = 0, toolName = "", argumentsText = "" } of calls) {
        while (drafts.length < index) drafts.push({ toolName: "", arguments: "" });
        const draft = drafts[index] ?? { toolName: "", arguments: "" };
        drafts[index] = { toolName: draft.toolName + toolName, arguments: draft.arguments + argumentsText };
      }
      return { ...each, text: each.text + text + refusal, reasoning: each.reasoning + reasoning, drafts };
    });
  } else if (event.roundEnded) {
    next.rounds = changed(view.rounds, event.roundEnded.round ?? 0, (each) => ({ ...each, done: true }));
  } else if (event.callChanged?.call) {
    const call = event.callChanged.call;
    const id = call.callId ?? "";
    next.calls = { ...view.calls, [id]: call };
    if (!view.calls[id])
      next.rounds = changed(view.rounds, call.round ?? 0, (each) => ({
        ...each,
        drafts: [],
        callIds: [...each.callIds, id],
      }));
  } else if (event.toolProgress) {
    const { callId = "", fraction, message = "" } = event.toolProgress;
    const told: Progress = fraction === undefined ? { message } : { fraction: Number(fraction), message };
    next.progress = { ...view.progress, [callId]: told };
  } else if (event.warning) {
    next.warnings = [...view.warnings, event.warning];
  }
  return next;
}

/** Returns the view that stands in place of events that are not kept any more. */
export function foldGap(view: RunView, gap: GapJson): RunView {
  const run = gap.snapshot?.run ?? view.run;
  const calls = Object.fromEntries((run.pendingCalls ?? []).map((call) => [call.callId ?? "", call]));
  return { ...emptyView(run), calls, seq: Number(gap.toSeq ?? view.seq), gap: true };
}

function changed(rounds: RoundView[], round: number, change: (each: RoundView) => RoundView): RoundView[] {
  const found = rounds.some((each) => each.round === round);
  const all: RoundView[] = found
    ? rounds
    : [...rounds, { round, attempt: 1, model: "", text: "", reasoning: "", drafts: [], callIds: [], done: false }];
  return all.map((each) => (each.round === round ? change(each) : each));
}
