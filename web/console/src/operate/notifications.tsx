/** Notifications by day: each is a sentence about its run, and links to it. */

import type { NotificationJson } from "@pawl/client";
import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { askedIn, inPairs, isFollowUp } from "../about";
import { Icon } from "../design/icons";
import type { Tone } from "../design/parts";
import { cut, plain, runLink, sentence, short, time } from "../format";
import { Entry, groups, type Resource } from "../resource";
import { verb, wish } from "../sentence";
import { attempt, countUnread, forPeople, may, pawl, unread } from "../state";
import { visible } from "../visible";

const READ = "notify.v1.NotifyService/AcknowledgeNotifications";
const MUTE = "notify.v1.PreferenceService/MuteConversation";

/** The tone of a kind, and its text about the subject of the run. */
const KINDS: Record<string, [Tone, string]> = {
  RUN_COMPLETED: ["ok", "completed"], RUN_FAILED: ["bad", "failed"], RUN_CANCELLED: ["grey", "was stopped"], RUN_EXPIRED: ["bad", "got no answer in time"],
  INPUT_NEEDED: ["warn", "waits for you"], APPROVAL_NEEDED: ["warn", ""], DECISION_NEEDED: ["warn", ""],
  ATTENTION_NEEDED: ["bad", "needs an operator"], JOB_ENDED: ["info", ""], CHANNEL_DISABLED: ["bad", ""],
};

const kindOf = ({ kind }: NotificationJson): string => (kind ?? "").replace("NOTIFICATION_KIND_", "");

async function acknowledge(notificationIds: string[]): Promise<void> {
  await pawl.notifications.acknowledgeNotifications({ notificationIds });
  await countUnread();
}

async function acknowledgeAll(): Promise<void> {
  for (let ids; (ids = idsOf((await pawl.notifications.listNotifications({ pageSize: 200, onlyUnread: true })).notifications ?? [])).length; ) await acknowledge(ids);
}

/** The subject of a notification: a call that waits, the message of its run, or the title that the server gave it. */
function titleOf(each: NotificationJson): string {
  const { title = "", kind, runId, callId, conversationId = "" } = each;
  const [, said = ""] = KINDS[kindOf(each)] ?? [];
  const call = forPeople.value.find((pending) => (callId ? pending.callId === callId : pending.runId === runId && kindOf(each) === "INPUT_NEEDED"));
  if (call) return wish(call);
  // Titles of workflows have the name, and titles of other users' runs name the tool.
  const about = said && /^Run /.test(title) && conversationId && runId ? askedIn(conversationId, runId) : "";
  if (about) return `“${about}” ${said}`;
  const [, whose, tool] = /^(.+)'s (\w+) (?:still )?awaits your approval/.exec(title) ?? [];
  if (whose && tool && tool !== "workflow") return `${visible(whose)} wants to ${verb(tool)}`;
  return sentence(visible(title.replace(/ (failed|stopped): .*/, " $1") || short(kind, "NOTIFICATION_KIND_")));
}

/** A completed follow-up may report a failure, so it is not green. A job has the tone of its end. */
function toneOf(each: NotificationJson): Tone {
  const kind = kindOf(each);
  if (kind === "JOB_ENDED") return / (failed|expired): /.test(each.title ?? "") ? "bad" : "info";
  return kind === "RUN_COMPLETED" && isFollowUp(each.runId ?? "") ? "info" : (KINDS[kind]?.[0] ?? "grey");
}

/** The rest: why it failed, or the run's answer. */
function detailOf({ title = "", body = "" }: NotificationJson): string {
  const [, why = ""] = /^(?:Run|Workflow \S+) (?:failed|stopped): (.+)/.exec(title) ?? [];
  return sentence(cut(plain(why || (/^[{[]/.test(body) ? "" : body.replace(/\{[^{}]*\}/g, inPairs)))));
}

/** Notifications of a day with the same title and kind are one, unless each needs a decision. */
const same = (each: NotificationJson): string => [each.title, each.kind, !!each.readTime, /_NEEDED$/.test(each.kind ?? "") && each.notificationId, (each.createTime ?? "").slice(0, 10)].join();

/** Where a notification leads: the decision, the run or the conversation. */
const target = ({ callId, runId, conversationId, notificationId }: NotificationJson): string => (callId ? `/inbox?call=${callId}` : runId ? `/runs/${runId}` : conversationId ? `/c/${conversationId}` : `/notifications/${notificationId}`);
const idsOf = (all: NotificationJson[]): string[] => all.map(({ notificationId = "" }) => notificationId);

function Mute({ conversationId }: { conversationId: string }): VNode {
  const [isMuted, setMuted] = useState(false);
  const mute = (): void => void attempt(async () => (await pawl.preferences.muteConversation({ mute: { conversationId } }), setMuted(true)));
  return isMuted ? <span role="status">Muted, see the settings</span> : <button class="plain small" onClick={mute}>Mute</button>;
}

export const notifications: Resource<NotificationJson[]> = {
  path: "notifications",
  lead: "Recent events of your runs and calls. Choose their kinds in the settings, and where to receive them in the channels.",
  empty: "No notifications yet.",
  list: async (pageToken, filters) => {
    const page = await pawl.notifications.listNotifications({ pageSize: 100, pageToken, onlyUnread: !!filters["unread"] });
    return { items: groups(page.notifications ?? [], same), next: page.nextPageToken };
  },
  tabs: { name: "unread", all: [["", "All"], ["1", "Unread"]], counts: async () => ({ "1": String(unread.value || "") }) },
  id: ([first]) => first?.notificationId ?? "", title: ([first = {}]) => titleOf(first), about: ([first = {}]) => detailOf(first),
  columns: [{ name: "Title", of: ([first = {}]) => titleOf(first) }, { name: "When", of: ([first]) => time(first?.createTime) }, { name: "Run", of: ([first]) => runLink(first?.runId) }],
  at: ([first]) => first?.createTime,
  entry: (all, reload) => {
    const [first = {}] = all;
    return (
      <Entry tone={toneOf(first)} to={target(first)} name={`${titleOf(first)}${all.length > 1 ? `, ${all.length} times` : ""}`} isUnread={!first.readTime} said={detailOf(first)} at={first.createTime}>
        {first.conversationId && <a href={`/c/${first.conversationId}`}>Conversation</a>}
        {!first.readTime && may(READ) && <button class="icon" aria-label="Mark as read" title="Mark as read" onClick={() => void attempt(async () => (await acknowledge(idsOf(all)), reload()))}><Icon name="check" /></button>}
        {may(MUTE) && first.conversationId && <Mute conversationId={first.conversationId} />}
      </Entry>
    );
  },
  all: [{ name: "Mark all as read", method: READ, when: () => unread.value > 0, run: acknowledgeAll }],
};
