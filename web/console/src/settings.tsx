/** Settings: notification kinds, quiet hours and muted conversations. */

import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import type { NotificationKindJson, PreferencesJson } from "@pawl/client";
import { type Editing, Editor } from "./editor";
import { ago, attempt, may, pawl, TIMES, times, who, word } from "./state";

const KINDS: NotificationKindJson[] = [
  "NOTIFICATION_KIND_RUN_COMPLETED",
  "NOTIFICATION_KIND_RUN_FAILED",
  "NOTIFICATION_KIND_RUN_CANCELLED",
  "NOTIFICATION_KIND_RUN_EXPIRED",
  "NOTIFICATION_KIND_INPUT_NEEDED",
  "NOTIFICATION_KIND_ATTENTION_NEEDED",
  "NOTIFICATION_KIND_APPROVAL_NEEDED",
  "NOTIFICATION_KIND_CHANNEL_DISABLED",
  "NOTIFICATION_KIND_JOB_ENDED",
  "NOTIFICATION_KIND_DECISION_NEEDED",
];
const UPDATE = "notify.v1.PreferenceService/UpdatePreferences";

export function Settings(): VNode {
  const [found, setFound] = useState<PreferencesJson>();
  const [muted, setMuted] = useState("");
  const change = (work: () => Promise<unknown>): void => void attempt(async () => (await work(), await load()));
  const load = async (): Promise<void> => setFound((await pawl.preferences.getPreferences({})).preferences ?? {});
  useEffect(() => void attempt(load), []);
  const kinds = found?.kinds ?? [];
  const writes = may(UPDATE);
  const quiet: Editing<PreferencesJson> = {
    name: "Edit quiet hours",
    method: UPDATE,
    value: ({ quiet: now }) => now ?? { hours: [{ start: "22:00", end: "07:00" }], timeZone: Intl.DateTimeFormat().resolvedOptions().timeZone },
    save: async (value) => void (await pawl.preferences.updatePreferences({ quiet: value })),
  };
  return (
    <section class="page">
      <h1>Settings</h1>
      <dl class="facts">
        <div>
          <dt>You</dt>
          <dd>
            {who.value?.caller?.userId} in {who.value?.caller?.storeId}: {(who.value?.caller?.roles ?? []).join(", ") || "member"}
          </dd>
        </div>
        <div>
          <dt>Pawl</dt>
          <dd>{who.value?.deployment?.version}</dd>
        </div>
      </dl>
      <label class="row">
        <span class="quiet">Show times as</span>
        <select value={times.value} onChange={(event) => localStorage.setItem("times", (times.value = event.currentTarget.value))}>
          {TIMES.map((each) => (
            <option key={each}>{each}</option>
          ))}
        </select>
      </label>
      <p>
        <a href="/channels">Notification channels</a> · <a href="/notifications">Notification history</a>
      </p>
      {found && (
        <>
          <fieldset disabled={!writes}>
            <legend>Notify me about{kinds.length ? "" : " everything"}</legend>
            {KINDS.map((kind) => (
              <label key={kind} class="row">
                <input
                  type="checkbox"
                  disabled={kinds.length === 1 && kinds[0] === kind}
                  checked={!kinds.length || kinds.includes(kind)}
                  onChange={(event) => {
                    const now = kinds.length ? kinds : KINDS;
                    const next = event.currentTarget.checked ? [...now, kind] : now.filter((each) => each !== kind);
                    change(() => pawl.preferences.updatePreferences({ kinds: { kinds: next } }));
                  }}
                />
                {word(kind.replace("NOTIFICATION_KIND_", ""))}
              </label>
            ))}
          </fieldset>
          <h2>Quiet hours</h2>
          {found.quiet?.hours?.map((hours, key) => (
            <p key={key}>
              {hours.start} to {hours.end} {found.quiet?.timeZone} {hours.days?.map((day) => word(day.replace("WEEKDAY_", ""))).join(", ")}
            </p>
          ))}
          {writes && <Editor key={JSON.stringify(found.quiet)} editing={quiet} item={found} onSaved={() => void attempt(load)} />}
          <h2>Muted conversations</h2>
          {!found.mutes?.length && <p class="quiet">None.</p>}
          {found.mutes?.map(({ conversationId = "", untilTime }) => (
            <p key={conversationId} class="buttons">
              <a href={`/c/${conversationId}`}>{conversationId}</a> {untilTime && `until ${ago(untilTime)}`}
              {writes && (
                <button class="second" onClick={() => change(() => pawl.preferences.unmuteConversation({ conversationId }))}>
                  Unmute
                </button>
              )}
            </p>
          ))}
          {writes && (
            <form
              class="row"
              onSubmit={(event) => {
                event.preventDefault();
                change(() => pawl.preferences.muteConversation({ mute: { conversationId: muted.trim() } }));
                setMuted("");
              }}
            >
              <input aria-label="Conversation to mute" placeholder="conv_..." required value={muted} onInput={(event) => setMuted(event.currentTarget.value)} />
              <button>Mute</button>
            </form>
          )}
        </>
      )}
    </section>
  );
}
