/** The settings of the store: each with its value, its ceiling and the layer that decides it. */

import type { ExplanationJson, SettingsChangeJson, SettingsJson, SettingsLayerJson } from "@pawl/client";
import type { VNode } from "preact";

import { Badge, Skeleton, type Tone } from "../design/parts";
import { type Column, Table } from "../design/table";
import { type Editing, useEditor } from "../editor";
import type { FieldSpec, Option } from "../fields";
import { time } from "../format";
import { Below, useRead } from "../resource";
import { may, pawl, who } from "../state";
import { visible } from "../visible";

const UPDATE = "settings.v1.SettingsService/UpdateSettings";
/** Names of settings by group, with what they mean. Settings without a text here are in the last group. */
const GROUPS: [string, Record<string, [label: string, hint: string]>][] = [
  ["Features", {
    runs: ["Runs", "Start runs of any kind."],
    background: ["Background work", "Start jobs, workflows and goals."],
    delegation: ["Delegation", "Runs may start runs of other agents."],
    schedules: ["Schedules", "Schedules fire."],
    triggers: ["Triggers", "Triggers fire."],
  }],
  ["Runs at the same time", {
    active_runs: ["Active runs", "More runs wait in the queue."],
    active_runs_per_user: ["Active runs per user", "More runs of a user wait in the queue."],
    background_runs: ["Background runs", "In addition to the active runs."],
    weight: ["Weight", "Turns of this store compared with others, 1 to 100."],
  }],
  ["Tokens", {
    daily_tokens: ["Tokens per day", "Of all runs. Once they are used up, runs wait until the day ends (UTC)."],
    monthly_tokens: ["Tokens per month", "Of all runs."],
    daily_tokens_per_user: ["Tokens per day and user", "Of all runs of each user."],
    monthly_tokens_per_user: ["Tokens per month and user", "Of all runs of each user."],
    model_requests_per_minute: ["Model requests per minute", "More requests wait."],
    model_tokens_per_minute: ["Model tokens per minute", "More requests wait."],
  }],
  ["Each run", {
    rounds_max: ["Rounds", "A run that asks for more gets this value."],
    calls_per_round_max: ["Calls in a round", ""],
    model_attempts_max: ["Attempts of a model call", ""],
    agent_depth_max: ["Depth of delegation", ""],
    total_tokens_max: ["Token budget", ""],
    tool_timeout_seconds: ["Timeout of a tool (s)", ""],
    round_timeout_seconds: ["Timeout of a round (s)", ""],
    run_timeout_seconds: ["Timeout of a run (s)", ""],
    provider_wait_seconds: ["Wait for the model server (s)", ""],
  }],
  ["Models", { models: ["Models", "That agents may use."], model_server: ["Model server", "Set by a deployment key."] }],
];
const LAYERS: Record<string, [Tone, string]> = { SETTINGS_LAYER_STORE: ["accent", "Store"], SETTINGS_LAYER_CEILING: ["info", "Ceiling"], SETTINGS_LAYER_DEPLOYMENT: ["info", "Deployment"] };
const NUMBER = /^\d+$/;

const text = (value: string): string => (NUMBER.test(value) ? Number(value).toLocaleString() : visible(value));

const models = async (): Promise<Option[]> => [[who.value?.deployment?.model ?? "", ""]];
const LIMITS = GROUPS.slice(1, 4).flatMap(([group, all]) =>
  Object.entries(all).map(([name, [label, hint]]): FieldSpec => ({ at: `limits.${name}`, label, hint, kind: "number", half: true, ...(group === "Each run" ? { more: true } : {}) })),
);
const FIELDS: FieldSpec[] = [...LIMITS, { at: "models", label: "Models", kind: "lines", load: models, hint: "One per line. Without one, all models that the deployment allows." }];

async function read(layer: SettingsLayerJson): Promise<SettingsJson> {
  return (await pawl.settings.getSettings({ layer })).settings ?? {};
}

export function StoreSettings(): VNode {
  const [found, reload] = useRead(async () => {
    const [{ explanations = [] }, ceiling, own] = await Promise.all([pawl.settings.explainSettings({}), read("SETTINGS_LAYER_CEILING"), read("SETTINGS_LAYER_STORE")]);
    return { explanations, ceiling, own };
  });
  const editing: Editing<SettingsJson> = {
    name: "Edit limits",
    method: UPDATE,
    plain: true,
    value: ({ limits, models: allowed }) => ({ limits: Object.fromEntries(Object.entries(limits ?? {}).map(([name, value]) => [name, Number(value)])), models: allowed ?? [] }),
    // Without a value of the store's own, the present one applies.
    fields: FIELDS.map((field) => ({ ...field, ...(field.kind === "number" ? { placeholder: found?.explanations.find(({ name }) => field.at === `limits.${name}`)?.value ?? "" } : {}) })),
    save: async ({ limits = {}, models: allowed = [] }, { version = "0", limits: before = {}, models: allowedBefore = [] }) => {
      const unset = [...Object.keys(before).filter((name) => !(name in limits)), ...(allowedBefore.length && !allowed.length ? ["models"] : [])];
      await pawl.settings.updateSettings({ settings: { layer: "SETTINGS_LAYER_STORE", version, limits, models: allowed }, unset });
      return "Saved. It applies within five seconds.";
    },
  };
  const { button, form } = useEditor(found && may(UPDATE) ? editing : undefined, found?.own ?? {}, reload);
  if (!found) return <Skeleton />;
  const { explanations, ceiling } = found;
  const ceilingOf = ({ name = "", layer, value = "" }: ExplanationJson): string => ceiling.limits?.[name] ?? (layer === "SETTINGS_LAYER_DEPLOYMENT" ? value : "");
  const known = new Set(GROUPS.flatMap(([, all]) => Object.keys(all)));
  const groups = [...GROUPS, ["Others", Object.fromEntries(explanations.filter(({ name = "" }) => !known.has(name)).map(({ name = "" }) => [name, [name, ""]]))] as (typeof GROUPS)[number]];
  const columns = (all: (typeof GROUPS)[number][1]): Column<ExplanationJson>[] => [
    { name: "Setting", of: ({ name = "" }) => <b title={name}>{all[name]?.[0]}</b>, under: ({ name = "" }) => all[name]?.[1] },
    { name: "Value", size: 104, of: ({ value = "" }) => (value === "on" || value === "off" ? <Badge tone={value === "on" ? "ok" : "warn"}>{value}</Badge> : text(value)) },
    { name: "Ceiling", size: 112, priority: 3, of: (each) => text(ceilingOf(each)) || <span class="quiet">–</span> },
    { name: "Decided by", size: 112, priority: 2, of: ({ layer = "" }) => <Badge tone={LAYERS[layer]?.[0] ?? "grey"}>{LAYERS[layer]?.[1] ?? "Default"}</Badge> },
    { name: "Why", priority: 3, of: ({ reason, layer }) => <span class="quiet">{layer || !/^No layer/.test(reason ?? "") ? visible(reason ?? "") : ""}</span> },
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
        return some.length > 0 && <section key={group}><h2>{group}</h2><Table name={group} columns={columns(all)} items={some} /></section>;
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
