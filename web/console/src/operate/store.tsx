/** The settings of the store: each with its value, its ceiling and the layer that decides it. */

import type { ExplanationJson, SettingsChangeJson, SettingsJson, SettingsLayerJson } from "@pawl/client";
import type { VNode } from "preact";

import { type Action, Actions } from "../actions";
import { Badge, Skeleton, type Tone } from "../design/parts";
import { type Column, Table } from "../design/table";
import { type Editing, useEditor } from "../editor";
import type { FieldSpec } from "../fields";
import { time } from "../format";
import { Below, useRead } from "../resource";
import { may, pawl } from "../state";
import { visible } from "../visible";
import LABELS from "./settings.json";

const UPDATE = "settings.v1.SettingsService/UpdateSettings";
/** Labels and meanings of settings by name, by group. Others are in the last group. */
const GROUPS = Object.entries(LABELS as unknown as Record<string, Record<string, [label: string, hint: string]>>);
const LAYERS: Record<string, [Tone, string]> = { SETTINGS_LAYER_STORE: ["accent", "Store"], SETTINGS_LAYER_CEILING: ["info", "Ceiling"], SETTINGS_LAYER_DEPLOYMENT: ["info", "Deployment"] };
const NUMBER = /^\d+$/;
const isSwitch = (value: string): boolean => value === "on" || value === "off";

const text = (value: string): string => (NUMBER.test(value) ? Number(value).toLocaleString() : visible(value));

const LIMITS = GROUPS.slice(1, 4).flatMap(([group, all]) =>
  Object.entries(all).map(([name, [label, hint]]): FieldSpec => ({ at: `limits.${name}`, label, hint, kind: "number", half: true, ...(group === "Each run" ? { more: true } : {}) })),
);
const FIELDS: FieldSpec[] = [...LIMITS, { at: "models", label: "Models", kind: "lines", hint: "One per line. Without one, all models that the deployment allows." }];

async function read(layer: SettingsLayerJson): Promise<SettingsJson> {
  return (await pawl.settings.getSettings({ layer })).settings ?? {};
}

export function StoreSettings(): VNode {
  const [found, reload] = useRead(async () => {
    // Only deployment keys may read their layer, and the local key.
    const deployed = read("SETTINGS_LAYER_DEPLOYMENT").catch(() => undefined);
    const [{ explanations = [] }, ceiling, own, deployment] = await Promise.all([pawl.settings.explainSettings({}), read("SETTINGS_LAYER_CEILING"), read("SETTINGS_LAYER_STORE"), deployed]);
    return { explanations, ceiling, own, deployment };
  });
  const editing: Editing<SettingsJson> = {
    name: "Edit limits", method: UPDATE, plain: true,
    value: ({ limits, models: allowed }) => ({ limits: Object.fromEntries(Object.entries(limits ?? {}).map(([name, value]) => [name, Number(value)])), models: allowed ?? [] }),
    // Without a value of the store's own, the present one applies.
    fields: FIELDS.map((field) => ({ ...field, ...(field.kind === "number" ? { placeholder: found?.explanations.find(({ name }) => field.at === `limits.${name}`)?.value ?? "" } : {}) })),
    save: async ({ limits = {}, models: allowed = [] }, { version = "0", limits: before = {}, models: allowedBefore = [] }) => {
      const unset = [...Object.keys(before).filter((name) => !(name in limits)), ...(allowedBefore.length && !allowed.length ? ["models"] : [])];
      await pawl.settings.updateSettings({ settings: { layer: "SETTINGS_LAYER_STORE", version, limits, models: allowed }, unset });
      return "Saved. It applies within five seconds.";
    },
  };
  const { button, form, isOpen } = useEditor(found && may(UPDATE) ? editing : undefined, found?.own ?? {}, reload);
  if (!found) return <Skeleton />;
  if (isOpen) return <>{form}</>;
  const { explanations, ceiling, deployment } = found;
  const ceilingOf = ({ name = "", layer, value = "" }: ExplanationJson): string => ceiling.limits?.[name] ?? (layer === "SETTINGS_LAYER_DEPLOYMENT" ? value : "");
  const known = new Set(GROUPS.flatMap(([, all]) => Object.keys(all)));
  const groups = [...GROUPS, ["Others", Object.fromEntries(explanations.filter(({ name = "" }) => !known.has(name)).map(({ name = "" }) => [name, [name, ""]]))] as (typeof GROUPS)[number]];
  const turn = (state: "OFF" | "ALL", { name = "" }: ExplanationJson): Promise<unknown> =>
    pawl.settings.updateSettings({ settings: { layer: "SETTINGS_LAYER_DEPLOYMENT", version: deployment?.version ?? "0", switches: { [name]: { state: `SWITCH_STATE_${state}` } } } });
  const turns: Action<ExplanationJson>[] = [
    { name: "Switch off", method: UPDATE, bad: true, when: ({ value }) => value === "on", run: (each) => turn("OFF", each) },
    { name: "Switch on", method: UPDATE, when: ({ value }) => value === "off", run: (each) => turn("ALL", each) },
  ];
  const columns = (all: (typeof GROUPS)[number][1], some: ExplanationJson[]): Column<ExplanationJson>[] => [
    {
      name: "Setting",
      of: ({ name = "" }) => <b title={name}>{all[name]?.[0]}</b>,
      under: ({ name = "", reason = "", layer }) => <span class="whole">{all[name]?.[1]} {(layer || !/^(No layer|Set when)/.test(reason)) && visible(reason)}</span>,
    },
    { name: "Value", size: 120, num: true, priority: 1, of: ({ value = "" }) => (isSwitch(value) ? <Badge tone={value === "on" ? "ok" : "bad"}>{value}</Badge> : text(value)) },
    ...(some.some(ceilingOf) ? [{ name: "Ceiling", size: 112, num: true, priority: 3, of: (each: ExplanationJson) => text(ceilingOf(each)) } as const] : []),
    ...(some.some(({ value = "" }) => isSwitch(value))
      ? deployment && may(UPDATE) ? [{ name: "Change", size: 150, num: true, priority: 1, of: (each: ExplanationJson) => <Actions all={turns} item={each} onDone={reload} /> } as const] : []
      : [{ name: "Decided by", size: 112, priority: 2, num: true, of: ({ layer }: ExplanationJson) => (LAYERS[layer ?? ""] ? <Badge tone={LAYERS[layer ?? ""]![0]}>{LAYERS[layer ?? ""]![1]}</Badge> : <span class="quiet">Default</span>) } as const]),
  ];
  return (
    <>
      <div class="views">
        <p class="lead">The store can lower a limit, but not raise it above the ceiling of the deployment.{!may(UPDATE) && " Only admins can change limits."}</p>
        {button}
      </div>
      {form}
      {groups.map(([group, all]) => {
        const some = explanations.filter(({ name = "" }) => name in all);
        return some.length > 0 && (
          <section key={group}>
            <h2>{group}</h2>
            {group === "Features" && <p class="quiet">{deployment ? "A switch applies to all stores. Open runs keep the features that they started with." : "These switches apply to all stores. Only a deployment key can change them."}</p>}
            <Table name={group} columns={columns(all, some)} items={some} />
          </section>
        );
      })}
      <Below<SettingsChangeJson>
        key={found.own.version}
        name="Changes"
        method="settings.v1.SettingsService/ListSettingsChanges"
        load={async () => (await pawl.settings.listSettingsChanges({ pageSize: 20 })).changes}
        columns={[
          { name: "Change", of: ({ before = {}, after = {} }) => [...new Set([...Object.keys(before), ...Object.keys(after)])].map((name) => `${name}: ${text(before[name] ?? "not set")} → ${text(after[name] ?? "not set")}`).join("; ") },
          { name: "Layer", size: 112, priority: 2, of: ({ layer = "" }) => LAYERS[layer]?.[1] },
          { name: "By", size: 112, of: ({ userId }) => userId },
          { name: "When", size: 112, of: (each) => time(each.time) },
        ]}
      />
    </>
  );
}
