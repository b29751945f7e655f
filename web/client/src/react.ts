/** React hooks for a chat in a conversation. Components with the same conversation share one stream. */

import { useEffect, useMemo, useSyncExternalStore } from "react";

import { persist } from "./errors.js";
import { type BackgroundJobJson, type CallDecisionJson, type CallJson, type ConversationView, emptyConversation, type FrontEndTool, type Pawl, PawlError, pendingCalls, requestId, type RunJson, type Sent, type StartRunRequestJson, type Turn, turnsOf } from "./index.js";

/** A conversation by its ID, or by a key of your choice. With a key, the first message creates it. */
export type Where = { conversationId: string } | { conversationKey: string };

export interface Chat extends ConversationView {
  turns: Turn[];
  /** Calls waiting for the user: approvals and questions, also of jobs. */
  pendingCalls: CallJson[];
  /** The turn that has not ended; a message sent now waits for it. */
  active: Turn | undefined;
  /** The error that ended the stream. */
  error: PawlError | undefined;
  /** Sends a message. A failed attempt can be repeated with the same `requestId`. */
  send: (text: string, more?: StartRunRequestJson) => Promise<RunJson>;
  /** Stops the active turn. */
  stop: () => Promise<void>;
  /** Decides on a pending call as it was shown to the user. */
  decide: (call: CallJson, decision: CallDecisionJson) => Promise<void>;
}

export interface Job extends BackgroundJobJson {
  stop: (reason?: string) => Promise<void>;
}

/**
 * Returns a conversation and the actions that the user can take in it. Changes appear without a reload: streamed text, calls, background
 * jobs, and turns that they start. Offered calls of `tools` run in this page.
 */
export function useConversation(pawl: Pawl, where: Where, tools?: Record<string, FrontEndTool>): Chat {
  const [store, { view, error, sent }] = useStore(pawl, where);
  const turns = useMemo(() => turnsOf(view, sent), [view, sent]);
  useEffect(() => {
    const calls = turns.flatMap(({ log }) => Object.values(log.calls));
    for (const call of tools ? [...calls, ...pendingCalls(view)] : [])
      if (call.state === "CALL_STATE_OFFERED" && Object.hasOwn(tools!, call.toolName ?? "")) pawl.answer(call, tools!).catch(() => {});
  }, [view, turns, tools]);
  const active = turns.find(({ log, known }) => known && !log.ended);
  return {
    ...view,
    turns,
    active,
    error,
    pendingCalls: pendingCalls(view).filter(({ state }) => state === "CALL_STATE_AWAITING_APPROVAL" || state === "CALL_STATE_ASKED"),
    send: store.send,
    stop: async () => void (active && (await pawl.agent.cancelRun({ requestId: requestId(), runId: active.run.runId ?? "" }))),
    decide: async ({ runId = "", callId = "", approval }, decision) =>
      void (await pawl.agent.decide({ requestId: requestId(), runId, decision: { callId, digest: approval?.digest ?? "", ...decision } })),
  };
}

/** Returns the user's background jobs of a conversation, newest first, with the newest of those that have ended. */
export function useJobs(pawl: Pawl, where: Where): Job[] {
  const [, { view }] = useStore(pawl, where);
  return useMemo(() => {
    const stop = (jobId: string) => async (reason = "") => void (await pawl.jobs.stopJob({ requestId: requestId(), jobId, reason }));
    return Object.values(view.jobs)
      .sort((one, other) => Date.parse(other.createTime ?? "") - Date.parse(one.createTime ?? ""))
      .map((job) => ({ ...job, stop: stop(job.jobId ?? "") }));
  }, [pawl, view.jobs]);
}

interface State {
  view: ConversationView;
  sent: Sent[];
  error: PawlError | undefined;
}

const stores = new WeakMap<Pawl, Map<string, Store>>();

function useStore(pawl: Pawl, where: Where): [Store, State] {
  const all = stores.get(pawl) ?? new Map<string, Store>();
  stores.set(pawl, all);
  const name = JSON.stringify(where);
  const store = all.get(name) ?? new Store(pawl, where);
  all.set(name, store);
  return [store, useSyncExternalStore(store.subscribe, store.state, store.state)];
}

/** Follows a conversation while components show it. */
class Store {
  #state: State;
  readonly #listeners = new Set<() => void>();
  #leave: (() => void) | undefined;

  constructor(readonly pawl: Pawl, readonly where: Where) {
    this.#state = this.#empty();
  }

  #empty = (): State => ({ view: emptyConversation("conversationId" in this.where ? this.where.conversationId : ""), sent: [], error: undefined });

  state = (): State => this.#state;

  subscribe = (listener: () => void): (() => void) => {
    this.#listeners.add(listener);
    if (this.#listeners.size === 1) void this.#open();
    return () => {
      this.#listeners.delete(listener);
      if (this.#listeners.size) return;
      this.#leave?.();
      this.#leave = undefined;
      this.#state = this.#empty();
    };
  };

  send = async (text: string, more: StartRunRequestJson = {}): Promise<RunJson> => {
    const { run = {} } = await this.pawl.agent.startRun({ requestId: requestId(), ...this.where, text, ...more });
    this.#set({ sent: [...this.#state.sent, { run, text }] });
    this.#follow(run.conversationId ?? "");
    return run;
  };

  async #open(): Promise<void> {
    if ("conversationId" in this.where) return this.#follow(this.where.conversationId);
    const { where } = this;
    const opening = new AbortController();
    this.#leave = () => opening.abort();
    const found = await persist(() => this.pawl.conversations.getConversation(where), opening.signal).catch((error: PawlError) => error);
    if (opening.signal.aborted) return;
    this.#leave = undefined;
    const conversationId = found instanceof Error ? this.#state.sent[0]?.run.conversationId : found.conversation?.conversationId;
    if (conversationId) this.#follow(conversationId);
    else if (found instanceof PawlError && found.reason !== "CONVERSATION_NOT_FOUND") this.#set({ error: found });
    else this.#set({ view: { ...this.#state.view, caughtUp: true } });
  }

  #follow(conversationId: string): void {
    if (this.#leave || !this.#listeners.size) return;
    this.#leave = this.pawl.follow(conversationId, (view) => this.#set({ view, error: undefined }), (error) => this.#set({ error }));
  }

  #set(change: Partial<State>): void {
    this.#state = { ...this.#state, ...change };
    for (const each of this.#listeners) each();
  }
}
