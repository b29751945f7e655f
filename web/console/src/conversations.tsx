import { signal } from "@preact/signals";
import { type BackgroundJobJson, type ConversationJson, requestId, type RunJson } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { madeBy, nameOf } from "./about";
import { type Action, GONE } from "./actions";
import { Icon } from "./design/icons";
import { Skeleton, toneOf } from "./design/parts";
import { useRead } from "./resource";
import { ago, attempt, draft, forPeople, go, may, pawl, word } from "./state";
import { visible } from "./visible";

/** The listed conversations. They stay listed while another conversation opens. */
export const listed = signal<ConversationJson[] | undefined>(undefined);
const active = signal<RunJson[]>([]);
const hasMore = signal(false);
const search = signal({ words: "", archived: false, most: 50 });
const PAGE = 50;
let reads = 0;
let ahead: Promise<void> | undefined;

async function list({ words, archived, most } = search.value): Promise<void> {
  const read = ++reads;
  const found: ConversationJson[] = [];
  let pageToken = "";
  do {
    const page = await pawl.conversations.listConversations({ pageSize: PAGE, pageToken, query: words.trim(), archived });
    found.push(...(page.conversations ?? []));
    pageToken = page.nextPageToken ?? "";
  } while (pageToken && found.length < most);
  const isActive = found.some(({ activeRunId }) => activeRunId);
  const { runs = [] } = isActive ? await pawl.agent.listRuns({ pageSize: 100, states: ["RUN_STATE_WAITING", "RUN_STATE_NEEDS_ATTENTION"] }) : {};
  if (read !== reads) return;
  active.value = runs;
  listed.value = found;
  hasMore.value = !!pageToken;
}

export const reload = (): void => void attempt(() => list(), true);

/** Loads conversations before the user is known, which saves a round trip at the start. */
export function listAhead(): void {
  ahead = list().catch(() => (ahead = undefined));
}

/** Labels that link the versions of a conversation whose message was edited. Only the newest one is listed. */
const NEWER = "newer_version";
const OLDER = "older_version";
export const newer = ({ labels }: ConversationJson): string | undefined => labels?.[NEWER];
export const older = ({ labels }: ConversationJson): string | undefined => labels?.[OLDER];

function relabel({ conversationId = "", labels = {} }: ConversationJson, name: string, to: string): Promise<unknown> {
  const { [name]: _, ...others } = labels;
  return pawl.conversations.updateConversation({ requestId: requestId(), conversationId, labels: { labels: to ? { ...others, [name]: to } : others } });
}

/** Opens a copy of a conversation up to a message; without a message number, a new conversation. */
export async function fork(conversationId: string, number: number, text = ""): Promise<void> {
  const made = number ? await attempt(() => pawl.conversations.forkConversation({ requestId: requestId(), conversationId, number: String(number) })) : {};
  if (!made) return;
  draft.value = text;
  go(made.conversation?.conversationId ? `/c/${made.conversation.conversationId}` : "/");
}

/** Sends a message again, or an edited one, in a new version of the conversation, which replaces this one in the list. */
export async function resend(conversation: ConversationJson, number: number, start: (conversationId: string) => Promise<string>): Promise<boolean> {
  const { conversationId = "" } = conversation;
  const done = await attempt(async () => {
    const made = number ? await pawl.conversations.forkConversation({ requestId: requestId(), conversationId, number: String(number) }) : {};
    const id = await start(made.conversation?.conversationId ?? "");
    await Promise.all([relabel(conversation, NEWER, id), relabel({ conversationId: id }, OLDER, conversationId)]);
    go(`/c/${id}`);
    reload();
    return true;
  });
  return done ?? false;
}

const UPDATE = "agent.v1.ConversationService/UpdateConversation";

const ALL: Action<ConversationJson>[] = [
  {
    name: "Rename",
    method: UPDATE,
    ask: "Title",
    run: ({ conversationId = "" }, title) => pawl.conversations.updateConversation({ requestId: requestId(), conversationId, title }),
  },
  ...[true, false].map((archived) => ({
    name: archived ? "Archive" : "Unarchive",
    method: UPDATE,
    when: (each: ConversationJson) => !!each.archived !== archived,
    run: ({ conversationId = "" }: ConversationJson) => pawl.conversations.updateConversation({ requestId: requestId(), conversationId, archived }),
  })),
  {
    name: "Export as JSON",
    method: "agent.v1.AgentService/ListMessages",
    run: async (conversation) => (await import("./export")).save(conversation),
  },
  {
    name: "Delete",
    method: "agent.v1.ConversationService/EraseConversation",
    bad: true,
    run: async (conversation) => {
      await pawl.conversations.eraseConversation({ conversationId: conversation.conversationId ?? "", pageSize: 1 });
      const before = older(conversation);
      if (before) await pawl.conversations.getConversation({ conversationId: before }).then((found) => relabel(found.conversation ?? {}, NEWER, ""), () => {});
      return GONE;
    },
  },
];
export const ACTIONS = ALL.map((action) => ({ ...action, more: true as const }));

const DAY_MS = 86_400_000;

function byDay(all: ConversationJson[]): [string, ConversationJson[]][] {
  const today = new Date().setHours(0, 0, 0, 0);
  const days = new Map<string, ConversationJson[]>();
  for (const each of all) {
    const time = Date.parse(each.updateTime ?? "");
    const day = time >= today ? "Today" : time >= today - DAY_MS ? "Yesterday" : time >= today - 7 * DAY_MS ? "Last week" : "Earlier";
    days.set(day, [...(days.get(day) ?? []), each]);
  }
  return [...days];
}

export function Conversations({ conversationId, onChoose }: { conversationId: string; onChoose: () => void }): VNode {
  const { words, archived, most } = search.value;
  useEffect(() => {
    if (ahead) return void (ahead = undefined);
    const timer = setTimeout(reload, words ? 200 : 0);
    return () => clearTimeout(timer);
  }, [conversationId, words, archived, most]);
  const [jobs = []] = useRead(async () => (may("agent.v1.JobService/ListJobs") ? (await pawl.jobs.listJobs({ openOnly: true, pageSize: 200 })).jobs : []), [conversationId]);
  const shown = listed.value?.filter((each) => !newer(each) || each.conversationId === conversationId);
  // Conversations of jobs and workflows are folded, unless they need the user.
  const isMade = (each: ConversationJson): boolean => !words && !!madeBy(each.title ?? "") && each.conversationId !== conversationId && !isWaiting(each);
  const made = shown?.filter(isMade) ?? [];
  const items = (all: ConversationJson[]): VNode => <ul onClick={onChoose}>{all.map((each) => <Item key={each.conversationId} conversation={each} jobs={jobs} isOpen={each.conversationId === conversationId} />)}</ul>;
  return (
    <aside class="conversations" aria-label="Conversations">
      <a class="button second" href="/"><Icon name="plus" /> New conversation</a>
      <input type="search" aria-label="Search conversations" placeholder="Search conversations" value={words} onInput={(event) => (search.value = { ...search.value, words: event.currentTarget.value })} />
      {!shown && <Skeleton lines={5} />}
      {made.length > 0 && <details><summary class="quiet">Automated <small>{made.length}</small></summary>{items(made)}</details>}
      {byDay((shown ?? []).filter((each) => !isMade(each))).map(([day, all]) => (
        <div key={day}>
          <small class="quiet">{day}</small>
          {items(all)}
        </div>
      ))}
      {hasMore.value && <button class="plain" onClick={() => (search.value = { ...search.value, most: most + PAGE })}>More</button>}
      {shown?.length === 0 && <p class="quiet">{words ? "No matches." : archived ? "No archived conversations." : "No conversations yet."}</p>}
      <label class="row quiet">
        <input type="checkbox" checked={archived} onChange={(event) => (search.value = { ...search.value, archived: event.currentTarget.checked })} /> Show archived
      </label>
    </aside>
  );
}

const isWaiting = ({ conversationId }: ConversationJson): boolean => forPeople.value.some((call) => call.conversationId === conversationId);

function Item({ conversation, jobs, isOpen }: { conversation: ConversationJson; jobs: BackgroundJobJson[]; isOpen: boolean }): VNode {
  const { conversationId, title = "", updateTime, activeRunId } = conversation;
  const { tool, workflow } = madeBy(title) ?? {};
  const running = jobs.filter((job) => job.conversationId === conversationId).length;
  const state = active.value.find(({ runId }) => runId === activeRunId)?.state ?? "RUN_STATE_RUNNING";
  return (
    <li>
      <a href={`/c/${conversationId}`} aria-current={isOpen ? "page" : undefined} title={visible(title)}>
        <span class="cut">{(tool || workflow) && <Icon name={tool ? "background" : "workflows"} />} {nameOf(title) || "Untitled"}</span>
        <small class="quiet">
          {isWaiting(conversation) ? (
            <><i class="dot warn" /> waits for you</>
          ) : activeRunId ? <><i class={`dot ${toneOf(state)}`} /> {word(state)}</> : running ? <><i class="dot info" /> {running === 1 ? "a job runs" : `${running} jobs run`}</> : (
            <Ago time={updateTime} />
          )}
        </small>
      </a>
    </li>
  );
}

/** A time such as "2 min ago", which alone is drawn again each second. */
const Ago = ({ time }: { time: string | undefined }): VNode => <>{ago(time)}</>;
