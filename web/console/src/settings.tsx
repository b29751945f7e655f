/** Settings: notification kinds, quiet hours and muted conversations. */

import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import type { PreferencesJson } from "@pawl/client";
import { Head } from "./design/parts";
import { type Editing, Editor } from "./editor";
import type { Values } from "./fields";
import { ALL, KINDS } from "./kinds";
import { Fact } from "./runs";
import { ago, attempt, may, pawl, TIMES, times, who, word } from "./state";

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
    fields: [
      { at: "hours", label: "Hours", kind: "own", view: (props) => <Hours {...props} /> },
      { at: "timeZone", label: "Time zone", kind: "suggest", half: true, load: async () => Intl.supportedValuesOf("timeZone").map((zone) => [zone, ""] as const) },
    ],
    save: async (value) => void (await pawl.preferences.updatePreferences({ quiet: value })),
  };
  return (
    <section class="page narrow">
      <Head title="Settings" />
      <dl class="facts">
        <Fact name="User" value={who.value?.caller?.userId} />
        <Fact name="Store" value={who.value?.caller?.storeId} />
        <Fact name="Version of Pawl" value={who.value?.deployment?.version} />
        <Fact name="Roles" value={(who.value?.caller?.roles ?? []).join(", ") || "member"} />
      </dl>
      <div class="panel">
        <h2>Display</h2>
        <label>
          Show times as
          <select value={times.value} onChange={(event) => localStorage.setItem("times", (times.value = event.currentTarget.value))}>
            {TIMES.map((each) => (
              <option key={each}>{each}</option>
            ))}
          </select>
        </label>
      </div>
      {found && (
        <>
          <fieldset class="panel" disabled={!writes}>
            <h2>Notify me when</h2>
            {KINDS.map(([kind, label]) => (
              <label key={kind} class="row">
                <input
                  type="checkbox"
                  disabled={kinds.length === 1 && kinds[0] === kind}
                  checked={!kinds.length || kinds.includes(kind)}
                  onChange={(event) => {
                    const now = kinds.length ? kinds : ALL;
                    const next = event.currentTarget.checked ? [...now, kind] : now.filter((each) => each !== kind);
                    change(() => pawl.preferences.updatePreferences({ kinds: { kinds: next } }));
                  }}
                />
                {label}
              </label>
            ))}
            <p class="quiet">
              They arrive in <a href="/notifications">your notifications</a> and through <a href="/channels">channels</a>.
            </p>
          </fieldset>
          <div class="panel">
            <h2>Quiet hours</h2>
            {!found.quiet?.hours?.length && <p class="quiet">None. In quiet hours, channels send nothing.</p>}
            {found.quiet?.hours?.map((hours, key) => (
              <p key={key}>
                {hours.start} to {hours.end} {found.quiet?.timeZone} {hours.days?.map((day) => word(day.replace("WEEKDAY_", ""))).join(", ")}
              </p>
            ))}
            {writes && <Editor key={JSON.stringify(found.quiet)} editing={quiet} item={found} onSaved={() => void attempt(load)} />}
          </div>
          <div class="panel">
          <h2>Muted conversations</h2>
          {!found.mutes?.length && <p class="quiet">None. Mute one on the page of a notification, or here.</p>}
          {found.mutes?.map(({ conversationId = "", untilTime }) => (
            <p key={conversationId} class="row">
              <a href={`/c/${conversationId}`} class="cut">{conversationId}</a> {untilTime && `until ${ago(untilTime)}`}
              <span class="space" />
              {writes && (
                <button class="second small" onClick={() => change(() => pawl.preferences.unmuteConversation({ conversationId }))}>
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
              <button class="second">Mute</button>
            </form>
          )}
          </div>
        </>
      )}
    </section>
  );
}

const DAYS = ["MONDAY", "TUESDAY", "WEDNESDAY", "THURSDAY", "FRIDAY", "SATURDAY", "SUNDAY"];

/** Rows of quiet hours, each with a start, an end and its days. */
function Hours({ value, onValue }: { value: Values; onValue: (value: Values) => void }): VNode {
  const rows: Values[] = value["hours"] ?? [];
  const write = (hours: Values[]): void => onValue({ ...value, hours });
  const changed = (index: number, to: Values): void => write(rows.map((each, at) => (at === index ? { ...each, ...to } : each)));
  return (
    <>
      {rows.map((row, index) => (
        <div key={index} class="hours">
          <div class="row">
            <input type="time" aria-label={`Start ${index + 1}`} value={row["start"]} onInput={(event) => changed(index, { start: event.currentTarget.value })} />
            to
            <input type="time" aria-label={`End ${index + 1}`} value={row["end"]} onInput={(event) => changed(index, { end: event.currentTarget.value })} />
            <button type="button" class="second small" aria-label={`Remove hours ${index + 1}`} onClick={() => write(rows.filter((_, at) => at !== index))}>
              Remove
            </button>
          </div>
          <div class="buttons">
            {DAYS.map((day) => (
              <label key={day} class="row">
                <input
                  type="checkbox"
                  checked={!row["days"]?.length || row["days"].includes(`WEEKDAY_${day}`)}
                  onChange={(event) => {
                    const all: string[] = row["days"]?.length ? row["days"] : DAYS.map((each) => `WEEKDAY_${each}`);
                    changed(index, { days: event.currentTarget.checked ? [...all, `WEEKDAY_${day}`] : all.filter((each) => each !== `WEEKDAY_${day}`) });
                  }}
                />
                {word(day).slice(0, 3)}
              </label>
            ))}
          </div>
        </div>
      ))}
      <p class="buttons">
        <button type="button" class="second small" onClick={() => write([...rows, { start: "22:00", end: "07:00" }])}>
          Add hours
        </button>
      </p>
    </>
  );
}
