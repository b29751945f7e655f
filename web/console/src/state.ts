/** What all pages share: who is here, where they are, what waits. */

import { type ReadonlySignal, computed, signal } from "@preact/signals";
import { type CallJson, Pawl, PawlError, type RunJson, type WhoAmIResponseJson } from "@pawl/client";


export const pawl = new Pawl();

export const who = signal<WhoAmIResponseJson | null | undefined>(undefined);
export const path = signal(location.pathname);
export const query = signal(new URLSearchParams(location.search));
export const online = signal(true);
export const pendingCalls = signal<CallJson[]>([]);
export const pendingRuns = signal<RunJson[]>([]);
export const notice = signal("");
/** True if it passes by itself once the connection is there again. */
let passes = false;
/** What the next composer of a message begins with. */
export const draft = signal("");

/** What a person is writing, by where: it outlives a reload and a login, in this tab and for this user alone. */
const place = (where: string): string => `draft ${who.value?.caller?.storeId} ${who.value?.caller?.userId} ${where}`;

export function kept(where: string): string {
  return sessionStorage.getItem(place(where)) ?? "";
}

export function keep(where: string, text: string): void {
  if (text) sessionStorage.setItem(place(where), text);
  else sessionStorage.removeItem(place(where));
}

export const clock = signal(Date.now());

/** The calls that wait for a decision or an answer of a person. */
export const forPeople: ReadonlySignal<CallJson[]> = computed(() =>
  pendingCalls.value.filter(({ state }) => state === "CALL_STATE_AWAITING_APPROVAL" || state === "CALL_STATE_ASKED"),
);

setInterval(() => (clock.value = Date.now()), 1000);
window.addEventListener("popstate", () => show());

export function go(to: string): void {
  if (to !== location.pathname + location.search) history.pushState(null, "", to);
  show();
}

/** Returns a part of an address as it was meant; one that nobody can have meant stays as it is. */
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

/** Follows a link inside of the page; one that is opened elsewhere goes its own way. */
export function follow(event: MouseEvent): void {
  const link = (event.target as Element | null)?.closest("a");
  if (!link || link.origin !== location.origin || link.target || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go(link.pathname + link.search);
}

let leave: (() => void)[] = [];

/** Finds out who is here, and what waits for them. */
export async function arrive(): Promise<void> {
  try {
    who.value = await pawl.agent.whoAmI({});
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
  for (const each of leave) each();
  pawl.streams.onState = (connected) => {
    online.value = connected;
    if (connected && passes) notice.value = "";
  };
  // What all of the store ask for has no questions: those of one's own runs are among what is one's own.
  const scopes = who.value.caller?.decisionRight === "DECISION_RIGHT_STORE" ? [true, false] : [false];
  const told = scopes.map((): [CallJson[], RunJson[]] => [[], []]);
  leave = scopes.map((store, place) =>
    pawl.watchPending(
      (...found) => {
        told[place] = found;
        pendingCalls.value = [...new Map(told.flatMap(([calls]) => calls).map((call) => [call.callId, call])).values()];
        pendingRuns.value = [...new Map(told.flatMap(([, runs]) => runs).map((run) => [run.runId, run])).values()];
      },
      { store },
      (error) => void attempt(() => Promise.reject(error)),
    ),
  );
}

/** Windows with a stream at a time: a browser opens six connections to a host, for all of them together. */
const STREAMS_MAX = 4;
const TURN_MS = 2000;
const flips = new Set<() => void>();
document.addEventListener("visibilitychange", () => {
  for (const each of flips) each();
  flips.clear();
});

/** Returns once the window is shown or hidden, or after a time. */
function flipped(ms?: number): Promise<void> {
  return new Promise((done) => {
    flips.add(done);
    if (ms) setTimeout(() => (flips.delete(done), done()), ms);
  });
}

/** Has the stream while this window is seen, and after a while no other one waits for its place. */
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
    // Without TLS, and from elsewhere, there are no locks.
    if (!locks) await stream(async () => false);
    else {
      const { held = [] } = await locks.query();
      const names = Array.from({ length: STREAMS_MAX }, (_, place) => `stream ${place}`);
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
 * Does something, and says so if it fails; a session that is over leads to the login. What is asked again and again by itself
 * (`isPoll`) takes away nothing that was said, and says nothing of what passes.
 */
export async function attempt<T>(work: () => Promise<T>, isPoll = false): Promise<T | undefined> {
  try {
    if (!isPoll) notice.value = "";
    return await work();
  } catch (error) {
    if (error instanceof PawlError && error.code === "unauthenticated") who.value = null;
    const again = error instanceof PawlError && error.again;
    if (isPoll && again) return undefined;
    passes = again;
    notice.value = error instanceof Error ? error.message : String(error);
    return undefined;
  }
}

/** True if what was asked for is not there: to ask again brings nothing. */
export function isAbsent(error: unknown): boolean {
  return error instanceof PawlError && (["not_found", "invalid_argument"].includes(error.code) || error.reason === "CONVERSATION_ERASED");
}

export function may(method: string): boolean {
  return who.value?.caller?.methods?.includes(`/pawl.${method}`) ?? false;
}

export const STATES: Record<string, string> = {
  RUN_STATE_QUEUED: "queued",
  RUN_STATE_RUNNING: "running",
  RUN_STATE_WAITING: "waiting",
  RUN_STATE_CANCELLING: "stopping",
  RUN_STATE_NEEDS_ATTENTION: "needs attention",
  RUN_STATE_COMPLETED: "completed",
  RUN_STATE_FAILED: "failed",
  RUN_STATE_CANCELLED: "cancelled",
  RUN_STATE_EXPIRED: "expired",
};

export function word(state: string | undefined): string {
  return STATES[state ?? ""] ?? (state ?? "").replace(/^[A-Z]+_STATE_/, "").toLowerCase().replaceAll("_", " ");
}

export const TIMES = ["relative", "local", "UTC"] as const;
export const times = signal<string>(localStorage.getItem("times") ?? TIMES[0]);

/** Returns a time as its reader wants times: how far away it is, or by the clock. */
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

/** Returns how long something took, of any length. */
export function lasted(seconds: number): string {
  const ms = Math.round(seconds * 1000);
  return ms < 1 ? "< 1 ms" : ms < 1000 ? `${ms} ms` : `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

export function moment(time: string | undefined): string {
  return time ? new Date(time).toLocaleString() : "";
}
