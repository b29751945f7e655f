/** Notifications as a list of sentences, with filters. */

import type { NotificationJson } from "@pawl/client";

import { runLink, sentence, short, time } from "../format";
import type { Resource } from "../resource";
import { attempt, may, pawl } from "../state";
import { visible } from "../visible";

const READ = "notify.v1.NotifyService/AcknowledgeNotifications";
const acknowledge = (notificationId: string): Promise<unknown> => pawl.notifications.acknowledgeNotifications({ notificationIds: [notificationId] });
const titleOf = ({ title, kind }: NotificationJson): string => sentence(visible(title || short(kind, "NOTIFICATION_KIND_")));

export const notifications: Resource<NotificationJson> = {
  path: "notifications",
  lead: "Recent events of your runs and calls. Choose their kinds in the settings, and where to receive them in the channels.",
  empty: "No notifications yet.",
  list: async (pageToken, filters) => {
    const page = await pawl.notifications.listNotifications({ pageSize: 50, pageToken, onlyUnread: !!filters["unread"] });
    return { items: page.notifications ?? [], next: page.nextPageToken };
  },
  filters: [{ name: "unread", label: "Unread only", on: true }],
  id: ({ notificationId }) => notificationId ?? "",
  title: titleOf,
  columns: [
    { name: "Title", of: titleOf },
    { name: "Kind", of: ({ kind }) => short(kind, "NOTIFICATION_KIND_") },
    { name: "When", of: ({ createTime }) => time(createTime) },
    { name: "Read", of: ({ readTime }) => time(readTime) ?? "unread" },
    { name: "Run", of: ({ runId }) => runLink(runId) },
  ],
  at: ({ createTime }) => createTime,
  entry: (each, reload) => (
    <>
      <span class={`dot ${each.readTime ? "read" : "info"}`} title={each.readTime ? "" : "unread"} />
      <span class="what">
        <a href={`/notifications/${each.notificationId}`} data-item class={each.readTime ? "" : "unread"}>
          {titleOf(each)}
        </a>
        {each.body && <span class="quiet">{visible(each.body).slice(0, 300)}</span>}
        <span class="quiet links">
          {each.callId && <a href={`/inbox?call=${each.callId}`}>Decide</a>}
          {each.runId && runLink(each.runId, "Open the run")}
          {each.conversationId && <a href={`/c/${each.conversationId}`}>Open the conversation</a>}
          {!each.readTime && may(READ) && (
            <button class="plain small" onClick={() => void attempt(async () => (await acknowledge(each.notificationId ?? ""), reload()))}>
              Mark as read
            </button>
          )}
        </span>
      </span>
      <span class="quiet">{time(each.createTime)}</span>
    </>
  ),
  actions: [
    { name: "Mark as read", method: READ, when: ({ readTime }) => !readTime, run: ({ notificationId = "" }) => acknowledge(notificationId) },
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
