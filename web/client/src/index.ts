/** Pawl over HTTP: every public method with its types, and runs as they happen. */

import type { AgentService } from "../gen/pawl/agent/v1/agent_pb";
import type { AgentRegistryService } from "../gen/pawl/agent/v1/agents_pb";
import type { ConversationService } from "../gen/pawl/agent/v1/conversation_pb";
import type { JobService } from "../gen/pawl/agent/v1/jobs_pb";
import type { OperatorService } from "../gen/pawl/agent/v1/operator_pb";
import type { ScheduleService } from "../gen/pawl/agent/v1/schedule_pb";
import type { TriggerService } from "../gen/pawl/agent/v1/trigger_pb";
import type { WatchPendingResponseJson, WatchRunResponseJson } from "../gen/pawl/agent/v1/agent_pb";
import type { WhoAmIResponseJson } from "../gen/pawl/agent/v1/whoami_pb";
import type { CallJson } from "../gen/pawl/event/v1/call_pb";
import type { RunEventJson } from "../gen/pawl/event/v1/event_pb";
import type { RunJson } from "../gen/pawl/event/v1/run_pb";
import type { ChannelService } from "../gen/pawl/notify/v1/channel_pb";
import type { NotifyService } from "../gen/pawl/notify/v1/notify_pb";
import type { PreferenceService } from "../gen/pawl/notify/v1/preference_pb";
import type { AuditService } from "../gen/pawl/tool/v1/audit_pb";
import type { DocumentService } from "../gen/pawl/tool/v1/document_pb";
import type { RuleService } from "../gen/pawl/tool/v1/rule_pb";
import type { SourceService } from "../gen/pawl/tool/v1/source_pb";
import type { ToolService } from "../gen/pawl/tool/v1/tool_pb";
import { PawlError } from "./errors";
import { emptyView, fold, foldGap, isEnded, type RunView } from "./fold";
import { Streams } from "./stream";
import { type Options, type Service, Transport } from "./transport";

export * from "./errors";
export * from "./fold";
export { Streams, type Subscription } from "./stream";
export type { CallOptions, Options, Service } from "./transport";

/** Does one thing for a tool of the page: takes the arguments, and returns the result or throws. */
export type FrontEndTool = (args: any, call: CallJson) => unknown;

/** A caller of a suite, through its gateway. */
export class Pawl {
  readonly agent: Service<typeof AgentService>;
  readonly agents: Service<typeof AgentRegistryService>;
  readonly conversations: Service<typeof ConversationService>;
  readonly jobs: Service<typeof JobService>;
  readonly operator: Service<typeof OperatorService>;
  readonly schedules: Service<typeof ScheduleService>;
  readonly triggers: Service<typeof TriggerService>;
  readonly notifications: Service<typeof NotifyService>;
  readonly channels: Service<typeof ChannelService>;
  readonly preferences: Service<typeof PreferenceService>;
  readonly documents: Service<typeof DocumentService>;
  readonly sources: Service<typeof SourceService>;
  readonly tools: Service<typeof ToolService>;
  readonly rules: Service<typeof RuleService>;
  readonly audit: Service<typeof AuditService>;
  readonly streams: Streams;
  readonly #transport: Transport;

  constructor(options: Options = {}) {
    const transport = (this.#transport = new Transport(options));
    this.agent = transport.service("pawl.agent.v1.AgentService");
    this.agents = transport.service("pawl.agent.v1.AgentRegistryService");
    this.conversations = transport.service("pawl.agent.v1.ConversationService");
    this.jobs = transport.service("pawl.agent.v1.JobService");
    this.operator = transport.service("pawl.agent.v1.OperatorService");
    this.schedules = transport.service("pawl.agent.v1.ScheduleService");
    this.triggers = transport.service("pawl.agent.v1.TriggerService");
    this.notifications = transport.service("pawl.notify.v1.NotifyService");
    this.channels = transport.service("pawl.notify.v1.ChannelService");
    this.preferences = transport.service("pawl.notify.v1.PreferenceService");
    this.documents = transport.service("pawl.tool.v1.DocumentService");
    this.sources = transport.service("pawl.tool.v1.SourceService");
    this.tools = transport.service("pawl.tool.v1.ToolService");
    this.rules = transport.service("pawl.tool.v1.RuleService");
    this.audit = transport.service("pawl.tool.v1.AuditService");
    this.streams = new Streams(transport);
  }

  /** Logs the browser in, for a page of the gateway: the session is a cookie that no script can read. */
  async logIn(login: { key: string; store?: string; user?: string } | { code: string }): Promise<WhoAmIResponseJson> {
    return (await this.#transport.post("/login", login)).json() as Promise<WhoAmIResponseJson>;
  }

  async logOut(): Promise<void> {
    await this.#transport.post("/logout", {});
  }

  /**
   * Tells a run as it is after each event, from the first to the last, through lost connections and crashes; returns what
   * ends the watching. Several events that came together are told once, with those of them that are new.
   */
  watchRun(
    runId: string,
    told: (view: RunView, events: RunEventJson[]) => void,
    failed: (error: PawlError) => void = () => {},
  ): () => void {
    let view = emptyView({ runId });
    return this.streams.subscribe<WatchRunResponseJson>({
      method: "pawl.agent.v1.AgentService/WatchRun",
      request: () => ({ runId, afterSeq: String(view.seq) }),
      message: (message) => {
        if (message.gap) view = foldGap(view, message.gap);
        const fresh = (message.events ?? []).filter((event) => Number(event.seq ?? 0) > view.seq);
        for (const event of fresh) view = fold(view, event);
        told(view, fresh);
      },
      end: (error) => error && failed(error),
    });
  }

  /** Tells everything that waits for the caller, or with `store` for anybody of the store, whenever it changes. */
  watchPending(told: (calls: CallJson[], runs: RunJson[]) => void, options: { store?: boolean } = {}): () => void {
    let calls = new Map<string, CallJson>();
    let runs = new Map<string, RunJson>();
    let fresh = true;
    return this.streams.subscribe<WatchPendingResponseJson>({
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
        if (message.complete) told([...calls.values()], [...runs.values()]);
      },
    });
  }

  /** Returns the run once it has ended. */
  async result(runId: string, signal?: AbortSignal): Promise<RunJson> {
    for (;;) {
      try {
        const options = { timeoutMs: 40_000, ...(signal ? { signal } : {}) };
        const { run = {} } = await this.agent.getRun({ runId, waitSeconds: 30 }, options);
        if (isEnded(run)) return run;
      } catch (error) {
        if (!(error instanceof PawlError && error.again)) throw error;
        await new Promise((done) => setTimeout(done, 1000));
      }
    }
  }

  /** Answers a call that is offered to front ends with what a function of the page does. */
  async answer(call: CallJson, tools: Record<string, FrontEndTool>): Promise<void> {
    const tool = tools[call.toolName ?? ""];
    if (!tool) return;
    let content: unknown;
    let isError = false;
    try {
      content = (await tool(decode(call.argumentsJson), call)) ?? null;
    } catch (error) {
      [content, isError] = [{ error: String(error instanceof Error ? error.message : error) }, true];
    }
    const { runId = "", callId = "" } = call;
    await this.agent.submitToolResults({
      requestId: `page_${callId}`,
      runId,
      results: [{ runId, callId, contentJson: encode(content), isError }],
    });
  }
}

/** Returns a fresh id for a request, which may be sent again as it is. */
export function requestId(): string {
  return `web_${crypto.randomUUID().replaceAll("-", "")}`;
}

/** Returns the value of bytes that are JSON; undefined if there are none. */
export function decode(bytes: string | undefined): any {
  if (!bytes) return undefined;
  return JSON.parse(new TextDecoder().decode(Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0))));
}

/** Returns a value as bytes that are JSON. */
export function encode(value: unknown): string {
  const bytes = new TextEncoder().encode(JSON.stringify(value));
  let letters = "";
  // As many at once as any engine takes as arguments.
  for (let place = 0; place < bytes.length; place += 8192)
    letters += String.fromCharCode(...bytes.subarray(place, place + 8192));
  return btoa(letters);
}
