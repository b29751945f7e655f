import type { BackgroundJobJson, CallJson, ConversationJson, MessageJson, PartJson, RunJson, WatchConversationResponseJson } from "../gen/index.js";
import { emptyView, fold, foldGap, isEnded, type RunView } from "./fold.js";

/** A conversation as the caller can see it, folded from `WatchConversation`. */
export interface ConversationView {
  conversation: ConversationJson;
  /** In order. Starts at `firstNumber`; `listMessages` returns earlier ones. */
  messages: MessageJson[];
  firstNumber: number;
  /** The caller's runs by ID, with the runs that execute their calls. Includes the newest that had already ended. */
  runs: Record<string, RunJson>;
  /** The caller's jobs by ID. Includes the newest that had already ended. */
  jobs: Record<string, BackgroundJobJson>;
  /** Logs of the caller's runs in this conversation, by run ID. Runs that were never active have no log. */
  logs: Record<string, RunView>;
  /** True once everything that existed at the start is included. */
  caughtUp: boolean;
  /** Position of the stream. */
  cursor: string;
}

/** A run with the message that started it. Old runs, and runs of other users, have messages only. */
export interface Turn {
  run: RunJson;
  /** The log, or an empty one. */
  log: RunView;
  /** False if only messages are known. */
  known: boolean;
  asked: string;
  /** Images and documents of the message. */
  parts: PartJson[];
  /** Answers of the model, for a run without a log. */
  answers: string[];
  /** True if a background job started the run, not a message. */
  notice: boolean;
  /** Number of the last message; 0 if the conversation is empty. */
  last: number;
}

export function emptyConversation(conversationId: string): ConversationView {
  return { conversation: { conversationId }, messages: [], firstNumber: 1, runs: {}, jobs: {}, logs: {}, caughtUp: false, cursor: "" };
}

/** Returns the view after a response. Messages and events that it already has are skipped. */
export function foldConversation(view: ConversationView, { cursor, items = [], events = [], caughtUp, gap }: WatchConversationResponseJson): ConversationView {
  const next = { ...view, cursor: cursor || view.cursor, caughtUp: view.caughtUp || !!caughtUp };
  const first = Number(gap?.firstMessageNumber ?? 0);
  if (first && !view.messages.length) next.firstNumber = first;
  let last = Number(view.messages.at(-1)?.number ?? 0);
  for (const { conversation, message, run, job } of items) {
    if (conversation) next.conversation = conversation;
    if (run) next.runs = { ...next.runs, [run.runId ?? ""]: run };
    if (job) next.jobs = { ...next.jobs, [job.jobId ?? ""]: job };
    if (!message || Number(message.number) <= last) continue;
    last = Number(message.number);
    next.messages = [...next.messages, message];
  }
  const logOf = (runId = ""): RunView => next.logs[runId] ?? emptyView(next.runs[runId] ?? { runId });
  if (gap?.events) next.logs = withLog(next.logs, foldGap(logOf(gap.events.runId), gap.events));
  for (const event of events) next.logs = withLog(next.logs, fold(logOf(event.runId), event));
  return next;
}

export function withLog(logs: ConversationView["logs"], log: RunView): ConversationView["logs"] {
  return { ...logs, [log.run.runId ?? ""]: log };
}

/** Returns the calls waiting for the caller: in runs, in the runs that execute their calls, and in jobs. */
export function pendingCalls({ runs, jobs }: ConversationView): CallJson[] {
  return [...Object.values(runs), ...Object.values(jobs)].flatMap(({ pendingCalls: calls = [] }) => calls);
}

/** A run that the caller has just started. Its message is part of the conversation once the run is active. */
export interface Sent {
  run: RunJson;
  text: string;
  parts?: PartJson[];
}

/** Returns the turns of a conversation, oldest first. Turns of notices that the model did not answer are left out. */
export function turnsOf(view: ConversationView, sent: Sent[] = []): Turn[] {
  const { logs, messages } = view;
  const runs = { ...Object.fromEntries(sent.map(({ run }) => [run.runId ?? "", run])), ...view.runs };
  const turns = new Map<string, Turn>();
  const turnOf = (runId: string): Turn => {
    const run = runs[runId] ?? logs[runId]?.run ?? { runId, state: "RUN_STATE_COMPLETED" as const };
    const log = logs[runId] ?? emptyView(run);
    const fresh = { run: logs[runId] && !isEnded(run) ? log.run : run, log, known: !!(runs[runId] ?? logs[runId]), asked: "", parts: [], answers: [], notice: (run.generation ?? 0) > 0, last: 0 };
    const turn = turns.get(runId) ?? fresh;
    turns.set(runId, turn);
    return turn;
  };
  let imported = 0;
  for (const message of messages) {
    const { runId = "", role, text = "" } = message;
    // Imported messages belong to a run that is not listed. Each user message starts a turn.
    if (message.imported && role === "ROLE_USER") imported++;
    const turn = turnOf(message.imported ? `imported-${imported}` : runId);
    turn.last = Number(message.number ?? 0);
    if (role === "ROLE_USER" || role === "ROLE_NOTICE") {
      turn.notice ||= role === "ROLE_NOTICE" && !turn.asked;
      turn.asked ||= text;
      if (!turn.parts.length && message.parts) turn.parts = message.parts;
    } else if (role === "ROLE_ASSISTANT" && text) turn.answers.push(text);
  }
  const own = Object.values(runs).filter(({ parentRunId, reportsToConversationId: job }) => !parentRunId && !job);
  for (const { runId = "" } of own.sort((one, other) => Date.parse(one.createTime ?? "") - Date.parse(other.createTime ?? ""))) turnOf(runId);
  for (const { run, text, parts = [] } of sent) {
    const turn = turnOf(run.runId ?? "");
    turn.asked ||= text;
    if (!turn.parts.length) turn.parts = parts;
  }
  return [...turns.values()].filter(({ run, notice, answers }) => !(notice && run.state === "RUN_STATE_COMPLETED" && !answers.length && !run.outputText));
}
