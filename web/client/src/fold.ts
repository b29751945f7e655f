import type { CallJson, GapJson, RunEventJson, RunJson } from "../gen/index.js";

/** The output and calls of one round. */
export interface RoundView {
  round: number;
  attempt: number;
  model: string;
  text: string;
  reasoning: string;
  /** Calls that the model is still writing; complete ones are in `callIds`. */
  drafts: { toolName: string; arguments: string }[];
  callIds: string[];
  done: boolean;
  startTime?: string;
  /** How long the model reasoned. Set when its text or calls start. */
  reasoningSeconds?: number;
}

/** Other things that happened, in order: warnings, retried model calls, and messages received during the run. */
export interface NoteView {
  kind: "warning" | "retry" | "message" | "notice";
  text: string;
  round: number;
  /** Number of calls of the round before it; -1 if it precedes the text. */
  position: number;
}

export interface Progress {
  fraction?: number;
  message: string;
}

/** The state of a run, folded from its log. Folding an event twice has no effect. */
export interface RunView {
  run: RunJson;
  seq: number;
  rounds: RoundView[];
  calls: Record<string, CallJson>;
  progress: Record<string, Progress>;
  notes: NoteView[];
  /** True if earlier events are missing; `run` has their outcome. */
  gap: boolean;
  ended: boolean;
}

export const ENDED = new Set(["RUN_STATE_COMPLETED", "RUN_STATE_FAILED", "RUN_STATE_CANCELLED", "RUN_STATE_EXPIRED"]);

export function emptyView(run: RunJson): RunView {
  return { run, seq: 0, rounds: [], calls: {}, progress: {}, notes: [], gap: false, ended: isEnded(run) };
}

export const isEnded = (run: RunJson): boolean => ENDED.has(run.state ?? "");

/**
 * Returns the view after an event. Known events are skipped. The output of a failed model call is removed, so text never
 * appears twice.
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
    const started = { ...emptyRound(round, modelAttempt, model), ...(event.time ? { startTime: event.time } : {}) };
    next.rounds = [...view.rounds.filter((each) => each.round !== round), started];
  } else if (event.roundRetrying) {
    const { round = 0, reason = "", message } = event.roundRetrying;
    // Notes about the failed attempt precede the text of the next one.
    const before = view.notes.map((note) => (note.round === round ? { ...note, position: -1 } : note));
    next.notes = [...before, { kind: "retry", text: message || reason, round, position: -1 }];
    next.rounds = withRound(view.rounds, round, (each) => ({ ...each, text: "", reasoning: "", drafts: [] }));
  } else if (event.outputDelta) {
    const { round = 0, text = "", reasoning = "", refusal = "", calls = [] } = event.outputDelta;
    next.rounds = withRound(view.rounds, round, (each) => {
      const drafts = calls.length ? [...each.drafts] : each.drafts;
      for (const { index = 0, toolName = "", argumentsText = "" } of calls) {
        while (drafts.length < index) drafts.push({ toolName: "", arguments: "" });
        const draft = drafts[index] ?? { toolName: "", arguments: "" };
        drafts[index] = { toolName: draft.toolName + toolName, arguments: draft.arguments + argumentsText };
      }
      const grown = { ...each, text: each.text + text + refusal, reasoning: each.reasoning + reasoning, drafts };
      return text || refusal || calls.length ? withReasoningEnd(grown, event.time) : grown;
    });
  } else if (event.roundEnded) {
    next.rounds = withRound(view.rounds, event.roundEnded.round ?? 0, (each) => withReasoningEnd({ ...each, done: true }, event.time));
  } else if (event.callChanged?.call) {
    const call = event.callChanged.call;
    const id = call.callId ?? "";
    next.calls = { ...view.calls, [id]: call };
    if (!view.calls[id])
      next.rounds = withRound(view.rounds, call.round ?? 0, (each) => ({ ...each, drafts: [], callIds: [...each.callIds, id] }));
  } else if (event.toolProgress) {
    const { callId = "", fraction, message = "" } = event.toolProgress;
    const latest: Progress = fraction === undefined ? { message } : { fraction: Number(fraction), message };
    next.progress = { ...view.progress, [callId]: latest };
  } else if (event.warning) {
    next.notes = withNote(view, "warning", event.warning.message || event.warning.reason);
  } else if (event.messageAdded && view.rounds.length) {
    const { role, text } = event.messageAdded.message ?? {};
    if (role === "ROLE_USER" || role === "ROLE_NOTICE") next.notes = withNote(view, role === "ROLE_USER" ? "message" : "notice", text);
  }
  return next;
}

/** Returns the view that replaces events no longer stored. */
export function foldGap(view: RunView, gap: GapJson): RunView {
  const run = gap.snapshot?.run ?? view.run;
  const calls = Object.fromEntries((run.pendingCalls ?? []).map((call) => [call.callId ?? "", call]));
  return { ...emptyView(run), calls, seq: Number(gap.toSeq ?? view.seq), gap: true };
}

function withNote({ rounds, notes }: RunView, kind: NoteView["kind"], text = ""): NoteView[] {
  const last = rounds.at(-1);
  const position = last && (last.done || last.text || last.reasoning || last.callIds.length) ? last.callIds.length : -1;
  return [...notes, { kind, text, round: last?.round ?? 0, position }];
}

function emptyRound(round: number, attempt = 1, model = ""): RoundView {
  return { round, attempt, model, text: "", reasoning: "", drafts: [], callIds: [], done: false };
}

function withReasoningEnd(round: RoundView, time: string | undefined): RoundView {
  if (!round.reasoning || !round.startTime || !time || round.reasoningSeconds !== undefined) return round;
  return { ...round, reasoningSeconds: (Date.parse(time) - Date.parse(round.startTime)) / 1000 };
}

function withRound(rounds: RoundView[], round: number, change: (each: RoundView) => RoundView): RoundView[] {
  const all = rounds.some((each) => each.round === round) ? rounds : [...rounds, emptyRound(round)];
  return all.map((each) => (each.round === round ? change(each) : each));
}
