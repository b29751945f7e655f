/** Notifications by day: each is a sentence about its run, and links to it. */

import type { NotificationJson } from "@pawl/client";

import { askedIn, isFollowUp } from "../about";
import { Icon } from "../design/icons";
import type { Tone } from "../design/parts";
import { cut, plain, runLink, sentence, short, time } from "../format";
import { Entry, paged, type Resource } from "../resource";
import { verb, wish } from "../sentence";
import { attempt, countUnread, forPeople, may, pawl, unread } from "../state";
import { visible } from "../visible";

const READ = "notify.v1.NotifyService/AcknowledgeNotifications";
const PAGE = 200;

/** The tone of a kind, and what it says of the subject of its run. */
const KINDS: Record<string, [Tone, string]> = {
  RUN_COMPLETED: ["ok", "completed"],
  RUN_FAILED: ["bad", "failed"],
  RUN_CANCELLED: ["grey", "was stopped"],
  RUN_EXPIRED: ["bad", "got no answer in time"],
  INPUT_NEEDED: ["warn", "waits for you"],
  ATTENTION_NEEDED: ["bad", "needs an operator"],
  APPROVAL_NEEDED: ["warn", ""],
  DECISION_NEEDED: ["warn", ""],
  JOB_ENDED: ["info", ""],
  CHANNEL_DISABLED: ["bad", ""],
};

const kindOf = ({ kind }: NotificationJson): string => (kind ?? "").replace("NOTIFICATION_KIND_", "");

async function acknowledge(notificationIds: string[]): Promise<void> {
  await pawl.notifications.acknowledgeNotifications({ notificationIds });
  await countUnread();
}

async function acknowledgeAll(): Promise<void> {
  for (let ids; (ids = ((await pawl.notifications.listNotifications({ pageSize: PAGE, onlyUnread: true })).notifications ?? []).map(({ notificationId = "" }) => notificationId)).length; ) await acknowledge(ids);
}

/** What a notification is about: a call that waits, the message of its run, or the title that the server gave it. */
function titleOf(each: NotificationJson): string {
  const { title = "", kind, runId, callId, conversationId = "" } = each;
  const [, said = ""] = KINDS[kindOf(each)] ?? [];
  const call = forPeople.value.find((pending) => (callId ? pending.callId === callId : pending.runId === runId && kindOf(each) === "INPUT_NEEDED"));
  if (call) return wish(call);
  // Titles of workflows have the name, and those of runs of other users the tool.
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

/** The rest: why it failed, or what the run said. */
function detailOf({ title = "", body = "" }: NotificationJson): string {
  const [, why = ""] = /^(?:Run|Workflow \S+) (?:failed|stopped): (.+)/.exec(title) ?? [];
  return sentence(cut(plain(why || (/^[{[]/.test(body) ? "" : body))));
}

export const notifications: Resource<NotificationJson> = {
  path: "notifications",
  lead: "Recent events of your runs and calls. Choose their kinds in the settings, and where to receive them in the channels.",
  empty: "No notifications yet.",
  list: paged("notifications", (page, filters) => pawl.notifications.listNotifications({ ...page, onlyUnread: !!filters["unread"] })),
  tabs: { name: "unread", all: [["", "All"], ["1", "Unread"]] },
  id: ({ notificationId }) => notificationId ?? "",
  title: titleOf,
  columns: [
    { name: "Title", of: titleOf },
    { name: "Kind", of: ({ kind }) => sentence(short(kind, "NOTIFICATION_KIND_")) },
    { name: "When", of: ({ createTime }) => time(createTime) },
    { name: "Read", of: ({ readTime }) => time(readTime) ?? "unread" },
    { name: "Run", of: ({ runId }) => runLink(runId) },
    { name: "Conversation", of: ({ conversationId: id }) => id && <a href={`/c/${id}`}>{id.slice(-8)}</a> },
  ],
  at: ({ createTime }) => createTime,
  entry: (each, reload) => (
    <Entry tone={toneOf(each)} to={each.callId ? `/inbox?call=${each.callId}` : `/notifications/${each.notificationId}`} name={titleOf(each)} isUnread={!each.readTime} said={detailOf(each)} at={each.createTime}>
      {each.callId && <a href={`/inbox?call=${each.callId}`}>Decide</a>}
      {runLink(each.runId, "Run")}
      {each.conversationId && <a href={`/c/${each.conversationId}`}>Conversation</a>}
      {!each.readTime && may(READ) && <button class="icon" aria-label="Mark as read" title="Mark as read" onClick={() => void attempt(async () => (await acknowledge([each.notificationId ?? ""]), reload()))}><Icon name="check" /></button>}
    </Entry>
  ),
  all: [{ name: "Mark all as read", method: READ, when: () => unread.value > 0, run: acknowledgeAll }],
  actions: [
    { name: "Mark as read", method: READ, when: ({ readTime }) => !readTime, run: ({ notificationId = "" }) => acknowledge([notificationId]) },
    {
      name: "Mute conversation",
      method: "notify.v1.PreferenceService/MuteConversation",
      when: ({ conversationId }) => !!conversationId,
      run: async ({ conversationId = "" }) => {
        await pawl.preferences.muteConversation({ mute: { conversationId } });
        return "The conversation is muted. Unmute it in the settings.";
      },
    },
  ],
  below: ({ body }) => (body ? <p class="panel prose">{visible(body)}</p> : null),
};
