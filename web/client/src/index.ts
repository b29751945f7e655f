/** The HTTP client of Pawl: every public method with its types, and live runs. */

import type * as pb from "../gen/index.js";
import { type ConversationView, emptyConversation, foldConversation, withLog } from "./conversation.js";
import { type PawlError, persist } from "./errors.js";
import { emptyView, ENDED, fold, foldGap, isEnded, type RunView } from "./fold.js";
import { Streams, type Subscription } from "./stream.js";
import { Answers, type AnswerOptions, type FrontEndTool } from "./tools.js";
import { Transport } from "./transport.js";

export * from "./conversation.js";
export { PawlError, type Reason } from "./errors.js";
export * from "./fold.js";
export { decode, encode, requestId } from "./json.js";
export { Streams, type Subscription } from "./stream.js";
export type { AnswerOptions, FrontEndTool } from "./tools.js";
export type { CallOptions, Options, Service } from "./transport.js";
export type * from "../gen/index.js";

/** States in which a run waits for input or has ended. */
const RESTING = new Set([...ENDED, "RUN_STATE_WAITING", "RUN_STATE_NEEDS_ATTENTION"]);

/** The client of a suite. It connects to the gateway. */
export class Pawl extends Transport {
  readonly agent = this.service<typeof pb.AgentService>("pawl.agent.v1.AgentService");
  readonly agents = this.service<typeof pb.AgentRegistryService>("pawl.agent.v1.AgentRegistryService");
  readonly conversations = this.service<typeof pb.ConversationService>("pawl.agent.v1.ConversationService");
  readonly declarations = this.service<typeof pb.DeclarationService>("pawl.agent.v1.DeclarationService");
  readonly goals = this.service<typeof pb.GoalService>("pawl.agent.v1.GoalService");
  readonly jobs = this.service<typeof pb.JobService>("pawl.agent.v1.JobService");
  readonly operator = this.service<typeof pb.OperatorService>("pawl.agent.v1.OperatorService");
  readonly schedules = this.service<typeof pb.ScheduleService>("pawl.agent.v1.ScheduleService");
  readonly triggers = this.service<typeof pb.TriggerService>("pawl.agent.v1.TriggerService");
  readonly usage = this.service<typeof pb.UsageService>("pawl.agent.v1.UsageService");
  readonly workflows = this.service<typeof pb.WorkflowService>("pawl.agent.v1.WorkflowService");
  readonly notifications = this.service<typeof pb.NotifyService>("pawl.notify.v1.NotifyService");
  readonly channels = this.service<typeof pb.ChannelService>("pawl.notify.v1.ChannelService");
  readonly settings = this.service<typeof pb.SettingsService>("pawl.settings.v1.SettingsService");
  readonly preferences = this.service<typeof pb.PreferenceService>("pawl.notify.v1.PreferenceService");
  readonly documents = this.service<typeof pb.DocumentService>("pawl.tool.v1.DocumentService");
  readonly sources = this.service<typeof pb.SourceService>("pawl.tool.v1.SourceService");
  readonly tools = this.service<typeof pb.ToolService>("pawl.tool.v1.ToolService");
  readonly rules = this.service<typeof pb.RuleService>("pawl.tool.v1.RuleService");
  readonly audit = this.service<typeof pb.AuditService>("pawl.tool.v1.AuditService");
  readonly streams = new Streams(this);
  readonly #answers = new Answers(this.agent);

  /** Logs in the browser, for pages of the gateway. The session is a cookie that scripts cannot read. */
  async logIn(login: { key: string; store?: string; user?: string } | { code: string }): Promise<pb.WhoAmIResponseJson> {
    return (await this.post("/login", login)).json() as Promise<pb.WhoAmIResponseJson>;
  }

  async logOut(): Promise<void> {
    await this.post("/login/out", {});
  }

  /**
   * Watches a run until it ends, across reconnects, and passes its view and the new events to `onChange`.
   * Events that arrive together cause one call. Returns a function that stops watching.
   */
  watchRun(runId: string, onChange: (view: RunView, events: pb.RunEventJson[]) => void, onError: (error: PawlError) => void = () => {}): () => void {
    let view = emptyView({ runId });
    return this.streams.subscribe<pb.WatchRunResponseJson>({
      method: "pawl.agent.v1.AgentService/WatchRun",
      request: () => ({ runId, afterSeq: String(view.seq) }),
      message: (message) => {
        if (message.gap) view = foldGap(view, message.gap);
        const fresh = (message.events ?? []).filter((event) => Number(event.seq ?? 0) > view.seq);
        for (const event of fresh) view = fold(view, event);
        onChange(view, fresh);
        this.#markSeen(runId, fresh);
      },
      end: (error) => error && onError(error),
    });
  }

  /** Marks new states as seen, so that no notification is sent. A hidden page does not. */
  #markSeen(runId: string, events: pb.RunEventJson[]): void {
    const { document } = globalThis as { document?: { hidden: boolean } };
    if (events.some((event) => RESTING.has(event.runChanged?.run?.state ?? "")) && !document?.hidden)
      this.agent.getRun({ runId, afterSeq: events.at(-1)?.seq ?? "0" }).catch(() => {});
  }

  /**
   * Follows a conversation across reconnects until `onError` is called, and passes its view and the new events to
   * `onChange`: messages, runs, jobs, and the model's output in runs that a message or a background job started.
   * Returns a function that stops following.
   */
  follow(conversationId: string, onChange: (view: ConversationView, events: pb.RunEventJson[]) => void, onError: (error: PawlError) => void = () => {}): () => void {
    let view = emptyConversation(conversationId);
    let leaves: (() => void)[] = [];
    const leave = (): void => {
      const all = leaves;
      leaves = [];
      for (const each of all) each();
    };
    // The stream may have no events of a run that had ended when it first saw it. Both may also have them.
    const readLogs = (runs: pb.RunJson[]): void => {
      for (const run of runs.filter((each) => isEnded(each) && !each.parentRunId && !view.logs[each.runId ?? ""])) {
        view = { ...view, logs: withLog(view.logs, emptyView(run)) };
        const read = (log: RunView, events: pb.RunEventJson[]): void => {
          const { seq } = view.logs[run.runId ?? ""] ?? log;
          if (log.seq <= seq) return;
          view = { ...view, logs: withLog(view.logs, log) };
          onChange(view, events.filter((event) => Number(event.seq) > seq));
        };
        leaves.push(this.watchRun(run.runId ?? "", read));
      }
    };
    const readPast = async (before: unknown): Promise<void> => {
      if (leaves !== before) return;
      const list = this.agent.listRuns({ conversationId, order: "RUN_ORDER_NEWEST_FIRST", pageSize: 30 });
      const [{ runs = [] }, { jobs = [] }] = await Promise.all([list, this.jobs.listJobs({ conversationId })]);
      if (leaves !== before) return;
      const past = runs.filter((run) => isEnded(run) && !run.reportsToConversationId);
      const [pastRuns, pastJobs] = [past.map((run) => [run.runId ?? "", run]), jobs.map((job) => [job.jobId ?? "", job])];
      view = { ...view, runs: { ...Object.fromEntries(pastRuns), ...view.runs }, jobs: { ...Object.fromEntries(pastJobs), ...view.jobs } };
      readLogs(past);
      onChange(view, []);
    };
    const start = (): void => {
      const mine = leaves;
      const subscription: Subscription<pb.WatchConversationResponseJson> = {
        method: "pawl.agent.v1.ConversationService/WatchConversation",
        request: () => ({ conversationId, after: view.cursor }),
        message: (message) => {
          if (!message.cursor) return;
          const isFirst = !!message.caughtUp && !view.caughtUp;
          const fresh = (message.events ?? []).filter(({ runId = "", seq }) => Number(seq) > (view.logs[runId]?.seq ?? 0));
          view = foldConversation(view, message);
          readLogs((message.items ?? []).flatMap(({ run }) => run ?? []));
          onChange(view, fresh);
          this.#markSeen(fresh[0]?.runId ?? "", fresh);
          if (isFirst) readPast(mine).catch(() => {});
        },
        end: (error) => {
          if (error?.reason !== "SEQ_BEYOND_END") return error && onError(error);
          leave();
          view = emptyConversation(conversationId);
          start();
        },
      };
      leaves.push(this.streams.subscribe(subscription));
    };
    start();
    return leave;
  }

  /** Watches everything that waits for the caller, or with `store` for any user of the store, until `onError` is called. */
  watchPending(onChange: (calls: pb.CallJson[], runs: pb.RunJson[]) => void, options: { store?: boolean } = {}, onError: (error: PawlError) => void = () => {}): () => void {
    let calls = new Map<string, pb.CallJson>();
    let runs = new Map<string, pb.RunJson>();
    let fresh = true;
    return this.streams.subscribe<pb.WatchPendingResponseJson>({
      method: "pawl.agent.v1.AgentService/WatchPending",
      request: () => {
        fresh = true;
        return { filter: { scope: options.store ? "PENDING_SCOPE_STORE" : "PENDING_SCOPE_MINE" } };
      },
      message: (message) => {
        if (fresh) [calls, runs, fresh] = [new Map(), new Map(), false];
        for (const call of message.calls ?? []) calls.set(call.callId ?? "", call);
        for (const run of message.runs ?? []) runs.set(run.runId ?? "", run);
        for (const id of message.goneCallIds ?? []) calls.delete(id);
        for (const id of message.goneRunIds ?? []) runs.delete(id);
        if (message.complete) onChange([...calls.values()], [...runs.values()]);
      },
      end: (error) => error && onError(error),
    });
  }

  /**
   * Watches the nodes of a workflow run until it ends, and passes them to `onChange` now, and after each change or about a second.
   * Returns a function that stops watching.
   */
  watchExecution(runId: string, onChange: (execution: pb.GetExecutionResponseJson) => void, onError: (error: PawlError) => void = () => {}): () => void {
    const stopping = new AbortController();
    const { signal } = stopping;
    const follow = async (): Promise<void> => {
      for (;;) {
        const execution = await persist(() => this.workflows.getExecution({ runId }, { signal }), signal);
        if (signal.aborted) return;
        onChange(execution);
        if (isEnded(execution.run ?? {})) return;
        const afterSeq = execution.run?.lastSeq ?? "0";
        await persist(() => this.agent.getRun({ runId, waitSeconds: 1, afterSeq }, { signal }), signal);
      }
    };
    follow().catch((error: PawlError) => signal.aborted || onError(error));
    return () => stopping.abort();
  }

  /** Yields the events of a run after `afterSeq` until it ends, across reconnects. */
  async *events(runId: string, options: { afterSeq?: number; signal?: AbortSignal } = {}): AsyncGenerator<pb.RunEventJson> {
    let { afterSeq: seq = 0, signal } = options;
    let failure: PawlError | undefined;
    let out!: ReadableStreamDefaultController<pb.RunEventJson>;
    const arrived = new ReadableStream<pb.RunEventJson>({ start: (opened) => void (out = opened) }).getReader();
    const leave = this.streams.subscribe<pb.WatchRunResponseJson>({
      method: "pawl.agent.v1.AgentService/WatchRun",
      request: () => ({ runId, afterSeq: String(seq) }),
      message: ({ events = [], gap }) => {
        if (gap) seq = Math.max(seq, Number(gap.toSeq ?? 0));
        for (const event of events.filter((each) => Number(each.seq ?? 0) > seq)) {
          seq = Number(event.seq);
          out.enqueue(event);
        }
      },
      end: (error) => ((failure = error), out.close()),
    });
    const stop = (): void => (leave(), void arrived.cancel());
    signal?.addEventListener("abort", stop);
    try {
      if (signal?.aborted) return;
      for (let next; !(next = await arrived.read()).done; ) yield next.value;
      if (failure) throw failure;
    } finally {
      signal?.removeEventListener("abort", stop);
      leave();
    }
  }

  /** Waits until the run has ended, even while it waits for people, and returns it. */
  async result(runId: string, signal?: AbortSignal): Promise<pb.RunJson> {
    const options = { timeoutMs: 40_000, ...(signal ? { signal } : {}) };
    for (let afterSeq = "0"; ; ) {
      const { run = {} } = await persist(() => this.agent.getRun({ runId, waitSeconds: 30, afterSeq }, options), signal);
      if (isEnded(run)) return run;
      afterSeq = run.lastSeq ?? "0";
    }
  }

  /**
   * Runs the function for a call offered to front ends and submits its result. Returns the receipt, or undefined if
   * the call was answered elsewhere.
   *
   * Safe to call repeatedly. Of all windows and browsers of a user, one runs the function, once. If it disappears, another
   * takes over, provided the tool is safe to repeat. An unknown tool or an exception becomes an error for the model.
   */
  answer(call: pb.CallJson, tools: Record<string, FrontEndTool>, options: AnswerOptions = {}): Promise<pb.ReceiptJson | undefined> {
    return this.#answers.answer(call, tools, options);
  }
}
