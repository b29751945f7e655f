/** Settings: display, notifications, quiet hours and muted conversations of the user, and the settings of the store. */

import type { VNode } from "preact";

import type { NotificationKindJson, PreferencesJson } from "@pawl/client";
import { Fact, Head, Tabs } from "./design/parts";
import { type Editing, useEditor } from "./editor";
import { Checks, Options, Several, type Values } from "./fields";
import KINDS from "./kinds.json";
import { StoreSettings } from "./operate/store";
import { useRead } from "./resource";
import { ago, attempt, go, may, pawl, query, times, who, word } from "./state";

const UPDATE = "notify.v1.PreferenceService/UpdatePreferences";

const TIMES = [["relative", "Relative (5 min ago)"], ["local", "Local time"], ["UTC", "UTC"]] as const;
const TABS = [["", "Preferences"], ["store", "Store"]] as const;

export function Settings(): VNode {
  const tab = query.value.get("tab") === "store" ? "store" : "";
  const { userId, storeId, roles = [] } = who.value?.caller ?? {};
  return (
    <section class={`page ${tab ? "" : "narrow"}`}>
      <Head title="Settings" />
      <dl class="facts inline">
        <Fact name="User" value={userId} />
        <Fact name="Store" value={storeId} />
        <Fact name="Version of Pawl" value={who.value?.deployment?.version} />
        <Fact name="Roles" value={roles.join(", ") || "member"} />
      </dl>
      {may("settings.v1.SettingsService/ExplainSettings") && <Tabs name="Settings" all={TABS} open={tab} onOpen={(to) => go(`/settings${to && `?tab=${to}`}`)} />}
      {tab ? <StoreSettings /> : <Preferences />}
    </section>
  );
}

function Preferences(): VNode {
  const [found, load] = useRead(async (): Promise<PreferencesJson> => (await pawl.preferences.getPreferences({})).preferences ?? {});
  const change = (work: () => Promise<unknown>): void => void attempt(async () => (await work(), load()));
  const writes = may(UPDATE);
  const quiet: Editing<PreferencesJson> = {
    name: "Edit quiet hours", method: UPDATE,
    value: ({ quiet: now }) => now?.hours?.length ? now : { hours: [{ start: "22:00", end: "07:00" }], timeZone: Intl.DateTimeFormat().resolvedOptions().timeZone },
    fields: [
      { at: "hours", label: "Hours", kind: "own", view: (props) => <Hours {...props} /> },
      { at: "timeZone", label: "Time zone", kind: "suggest", half: true, load: async () => Intl.supportedValuesOf("timeZone").map((zone) => [zone, ""] as const) },
    ],
    save: async (value) => void (await pawl.preferences.updatePreferences({ quiet: value })),
  };
  const { button, form } = useEditor(writes && found ? quiet : undefined, found ?? {}, load);
  return (
    <>
      <div class="panel">
        <h2>Display</h2>
        <label class="row">
          Show times as
          <select class="short" value={times.value} onChange={(event) => localStorage.setItem("times", (times.value = event.currentTarget.value))}><Options all={TIMES} /></select>
        </label>
      </div>
      {found && (
        <>
          <fieldset class="panel" disabled={!writes}>
            <h2>Notify me when</h2>
            <Checks all={Object.entries(KINDS)} chosen={found.kinds} onChosen={(kinds) => change(() => pawl.preferences.updatePreferences({ kinds: { kinds: kinds as NotificationKindJson[] } }))} />
            <p class="quiet">They arrive in <a href="/notifications">your notifications</a> and through <a href="/channels">channels</a>.</p>
          </fieldset>
          <div class="panel">
            <h2>Quiet hours</h2>
            {!found.quiet?.hours?.length && <p class="quiet">None. During quiet hours, channels send nothing.</p>}
            {found.quiet?.hours?.map(({ start, end, days }) => <p key={start}>{start} to {end} {found.quiet?.timeZone} {days?.map((day) => word(day.replace("WEEKDAY_", ""))).join(", ")}</p>)}
            {button}
            {form}
          </div>
          <div class="panel">
            <h2>Muted conversations</h2>
          {!found.mutes?.length && <p class="quiet">None. Mute one in your notifications.</p>}
          {found.mutes?.map(({ conversationId = "", untilTime }) => (
            <p key={conversationId} class="row">
              <a href={`/c/${conversationId}`} class="cut">{conversationId}</a> {untilTime && `until ${ago(untilTime)}`}
              <span class="space" />
              {writes && <button class="second small" onClick={() => change(() => pawl.preferences.unmuteConversation({ conversationId }))}>Unmute</button>}
            </p>
          ))}
          </div>
        </>
      )}
    </>
  );
}

const DAYS = ["Mon", "Tues", "Wednes", "Thurs", "Fri", "Satur", "Sun"].map((day) => [`WEEKDAY_${day.toUpperCase()}DAY`, day.slice(0, 3)] as const);

/** Rows of quiet hours, each with a start, an end and its days. */
function Hours({ value, onValue }: { value: Values; onValue: (value: Values) => void }): VNode {
  const row = ({ start, end, days, ...rest }: Values, onRow: (row: Values) => void, number: number): VNode => (
    <div class="hours">
      <div class="row">
        <input type="time" aria-label={`Start ${number}`} value={start} onInput={(event) => onRow({ ...rest, start: event.currentTarget.value, end, days })} />
        to
        <input type="time" aria-label={`End ${number}`} value={end} onInput={(event) => onRow({ ...rest, start, end: event.currentTarget.value, days })} />
      </div>
      <Checks all={DAYS} chosen={days} onChosen={(chosen) => onRow({ ...rest, start, end, days: chosen })} />
    </div>
  );
  return <Several all={value["hours"] ?? []} onAll={(hours) => onValue({ ...value, hours })} blank={{ start: "22:00", end: "07:00" }} add="Add hours" row={row} />;
}
