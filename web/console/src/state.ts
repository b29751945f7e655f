/** State shared by all pages: the user, the location and pending items. */

import { type ReadonlySignal, computed, effect, signal } from "@preact/signals";
import { type BackgroundJobJson, type CallJson, Pawl, PawlError, type RunJson, type SubscribeResponseJson, type WhoAmIResponseJson } from "@pawl/client";

export const pawl = new Pawl();

export const who = signal<WhoAmIResponseJson | null | undefined>(undefined);
export const path = signal(location.pathname);
export const query = signal(new URLSearchParams(location.search));
export const online = signal(true);
export const pendingCalls = signal<CallJson[]>([]);
export const pendingRuns = signal<RunJson[]>([]);
/** Background jobs of the open conversation, by the call that started them. */
export const jobs = signal<Record<string, BackgroundJobJson>>({});
export const notice = signal("");
/** True if the notice disappears once the connection is restored. */
let isTemporary = false;
/** Initial text of the next message composer. */
export const draft = signal("");

/** Key of unsent text. Drafts survive a reload and a login, in this tab and for this user only. */
const draftKey = (where: string): string => `draft ${who.value?.caller?.storeId} ${who.value?.caller?.userId} ${where}`;

export const kept = (where: string): string => sessionStorage.getItem(draftKey(where)) ?? "";

export function keep(where: string, text: string): void {
  if (text) sessionStorage.setItem(draftKey(where), text);
  else sessionStorage.removeItem(draftKey(where));
}

const titles = signal<ReadonlyMap<string, string>>(new Map());

/** The title of one of the user's conversations, once it is loaded. */
export function titleOf(conversationId: string): string {
  const found = titles.value.get(conversationId);
  if (found !== undefined) return found || "a conversation";
  const know = (title: string): void => void (titles.value = new Map(titles.value).set(conversationId, title));
  queueMicrotask(() => {
    if (titles.value.has(conversationId)) return;
    know("");
    pawl.conversations.getConversation({ conversationId }).then(({ conversation }) => know(conversation?.title ?? ""), () => {});
  });
  return "a conversation";
}

export const unread = signal(0);

export async function countUnread(): Promise<void> {
  if (!may("notify.v1.NotifyService/ListNotifications")) return;
  await attempt(async () => (unread.value = Number((await pawl.notifications.listNotifications({ pageSize: 1, onlyUnread: true })).unreadCount ?? 0)), true);
}

/** Number of runs that need an operator, at most one page of them. */
export const needs = signal(0);

export async function countNeeds(): Promise<void> {
  if (!may("agent.v1.OperatorService/ListAttention")) return;
  await attempt(async () => (needs.value = (await pawl.operator.listAttention({ pageSize: 100 })).runs?.length ?? 0), true);
}

export const clock = signal(Date.now());

/** Calls waiting for a decision or an answer. */
export const forPeople: ReadonlySignal<CallJson[]> = computed(() =>
  pendingCalls.value.filter(({ state }) => state === "CALL_STATE_AWAITING_APPROVAL" || state === "CALL_STATE_ASKED"),
);

setInterval(() => (clock.value = Date.now()), 1000);
window.addEventListener("popstate", () => show());

export function go(to: string): void {
  if (to !== location.pathname + location.search) history.pushState(null, "", to);
  show();
}

/** Decodes a part of a path; returns it unchanged if it is malformed. */
export function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function show(): void {
  path.value = location.pathname;
  query.value = new URLSearchParams(location.search);
}

/** Handles a click on a link of the console, unless it opens another tab. */
export function follow(event: MouseEvent): void {
  const link = (event.target as Element | null)?.closest("a");
  if (!link || link.origin !== location.origin || link.target || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go(link.pathname + link.search);
}

let leave: (() => void)[] = [];

export const problems = signal<string[]>([]);
/** Whether the last of these problems has just been fixed. */
export const isFixed = signal(false);

/** Set while the user is logged in. Without it, the first page load makes no request that needs a login. */
const KNOWN = "logged in";
export const isKnown = (): boolean => !!localStorage.getItem(KNOWN);
effect(() => {
  if (who.value) localStorage.setItem(KNOWN, "yes");
  else if (who.value === null) localStorage.removeItem(KNOWN);
});

/** Returns whether the browser has a session, with the problems that `pawl dev` reports; nothing if offline. */
async function loginState(): Promise<{ session: boolean; problems?: string[] } | undefined> {
  return fetch("/login/state").then((answer) => answer.json(), () => undefined);
}

let isFollowing = false;

async function followProblems(): Promise<void> {
  if (isFollowing) return;
  isFollowing = true;
  for (let found = await loginState(); !found || found.problems; found = await loginState()) {
    const now = found?.problems ?? problems.value;
    if (problems.value.length && !now.length) setTimeout(() => (isFixed.value = false), FIXED_MS);
    isFixed.value = !now.length && (isFixed.value || problems.value.length > 0);
    problems.value = now;
    await flipped(PROBLEMS_MS);
    while (document.hidden) await flipped();
  }
  isFollowing = false;
}

/** Loads the user, and watches pending items. */
export async function arrive(): Promise<void> {
  try {
    who.value = isKnown() || (await loginState())?.session !== false ? await pawl.agent.whoAmI({}) : null;
  } catch (error) {
    if (error instanceof PawlError && error.again) {
      online.value = false;
      setTimeout(() => void arrive(), 1000);
      return;
    }
    who.value = null;
    return;
  }
  online.value = true;
  if (!who.value) return;
  void followProblems();
  for (const each of leave) each();
  pawl.streams.onState = (connected) => {
    online.value = connected;
    if (connected && isTemporary) notice.value = "";
  };
  // The scope of the store has no questions, so approvers also watch their own runs.
  const scopes = who.value.caller?.decisionRight === "DECISION_RIGHT_STORE" ? [true, false] : [false];
  const byScope = scopes.map((): [CallJson[], RunJson[]] => [[], []]);
  // Counted anew on each connection, in case some were missed.
  const news = { method: "pawl.notify.v1.NotifyService/Subscribe", request: () => (void countUnread(), { onlyNew: true }), message: ({ notification }: SubscribeResponseJson) => void (notification && unread.value++) };
  leave = scopes.map((store, index) =>
    pawl.watchPending(
      (...found) => {
        byScope[index] = found;
        pendingCalls.value = [...new Map(byScope.flatMap(([calls]) => calls).map((call) => [call.callId, call])).values()];
        pendingRuns.value = [...new Map(byScope.flatMap(([, runs]) => runs).map((run) => [run.runId, run])).values()];
      },
      { store },
      (error) => void attempt(() => Promise.reject(error)),
    ),
  );
  if (may("notify.v1.NotifyService/Subscribe")) leave.push(pawl.streams.subscribe(news));
}

/** Windows with an open stream. A browser opens only six connections to a host for all windows together. */
const STREAMS_MAX = 4;
const TURN_MS = 2000;
const PROBLEMS_MS = 1000;
const FIXED_MS = 10_000;
const flips = new Set<() => void>();
document.addEventListener("visibilitychange", () => {
  for (const each of flips) each();
  flips.clear();
});

/** Resolves when the window is shown or hidden, or after a time. */
function flipped(ms?: number): Promise<void> {
  return new Promise((done) => {
    flips.add(done);
    if (ms) setTimeout(() => (flips.delete(done), done()), ms);
  });
}

/** Streams while this window is visible, and no other window waits for the slot. */
async function stream(isWanted: () => Promise<boolean>): Promise<void> {
  pawl.streams.resume();
  do await flipped(TURN_MS);
  while (!document.hidden && !(await isWanted()));
  pawl.streams.pause();
}

async function takeTurns(): Promise<void> {
  pawl.streams.pause();
  const { locks } = navigator as { locks?: LockManager };
  for (;;) {
    while (document.hidden) await flipped();
    // Without TLS, browsers provide locks only on localhost.
    if (!locks) await stream(async () => false);
    else {
      const { held = [] } = await locks.query();
      const names = Array.from({ length: STREAMS_MAX }, (_, index) => `stream ${index}`);
      const name = names.find((each) => !held.some((lock) => lock.name === each)) ?? names[Math.floor(Math.random() * STREAMS_MAX)]!;
      await locks.request(name, () => stream(async () => !!(await locks.query()).pending?.some((lock) => lock.name === name)));
    }
  }
}
void takeTurns();

export async function logOut(): Promise<void> {
  sessionStorage.clear();
  await pawl.logOut().catch(() => {});
  location.href = "/";
}

/**
 * Runs `work`, and shows an error as a notice. An expired session leads to the login. A poll (`isPoll`) neither clears
 * notices nor reports temporary errors.
 */
export async function attempt<T>(work: () => Promise<T>, isPoll = false): Promise<T | undefined> {
  try {
    if (!isPoll) notice.value = "";
    return await work();
  } catch (error) {
    if (error instanceof PawlError && error.code === "unauthenticated") who.value = null;
    const again = error instanceof PawlError && error.again;
    if (isPoll && again) return undefined;
    isTemporary = again;
    notice.value = error instanceof Error ? error.message : String(error);
    return undefined;
  }
}

/** True if the item does not exist, so that a retry is pointless. */
export function isAbsent(error: unknown): boolean {
  return error instanceof PawlError && (["not_found", "invalid_argument"].includes(error.code) || error.reason === "CONVERSATION_ERASED");
}

export const may = (method: string): boolean => who.value?.caller?.methods?.includes(`/pawl.${method}`) ?? false;

export const STATES: Record<string, string> = {
  RUN_STATE_QUEUED: "queued",
  RUN_STATE_RUNNING: "running",
  RUN_STATE_WAITING: "waiting",
  RUN_STATE_CANCELLING: "being stopped",
  RUN_STATE_NEEDS_ATTENTION: "needs attention",
  RUN_STATE_COMPLETED: "completed",
  RUN_STATE_FAILED: "failed",
  RUN_STATE_CANCELLED: "stopped",
  RUN_STATE_EXPIRED: "expired",
};

export function word(state: string | undefined): string {
  return STATES[state ?? ""] ?? (state ?? "").replace(/^[A-Z]+_STATE_/, "").toLowerCase().replaceAll("_", " ");
}

/** How times are shown: relative, local or UTC. */
export const times = signal<string>(localStorage.getItem("times") ?? "relative");

/** Formats a time as set by the user: relative, local or UTC. */
export function ago(time: string | undefined): string {
  if (!time) return "";
  if (times.value === "local") return moment(time);
  if (times.value === "UTC") return time.replace("T", " ").replace(/(\.\d+)?Z$/, " UTC");
  const seconds = Math.round((clock.value - Date.parse(time)) / 1000);
  const far = Math.abs(seconds);
  const text =
    far < 5 ? "now" : far < 60 ? `${far} s` : far < 3600 ? `${Math.round(far / 60)} min` : far < 86400 ? `${Math.round(far / 3600)} h` : `${Math.round(far / 86400)} d`;
  return text === "now" ? text : seconds < 0 ? `in ${text}` : `${text} ago`;
}

export function lasted(seconds: number): string {
  const ms = Math.round(seconds * 1000);
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} m`;
  if (seconds >= 60) return `${Math.floor(seconds / 60)} m ${Math.floor(seconds % 60)} s`;
  return ms < 1 ? "< 1 ms" : ms < 1000 ? `${ms} ms` : `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

export const moment = (time: string | undefined): string => time ? new Date(time).toLocaleString() : "";
