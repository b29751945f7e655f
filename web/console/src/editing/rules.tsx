/** Approval rules: their list as sentences of a table, and the form. */

import { requestId, type RuleJson } from "@pawl/client";
import type { VNode } from "preact";

import { GONE } from "../actions";
import { Badge, type Tone } from "../design/parts";
import { Table } from "../design/table";
import { type FieldSpec, type Option, Options, Several, type Values } from "../fields";
import { cut, sentence, short, time } from "../format";
import { paged, type Resource } from "../resource";
import { unpack } from "../json";
import { pawl } from "../state";
import { Care } from "./agents";
import { agentOptions, toolOptions } from "./options";

const EFFECTS: Record<string, Tone> = { RULE_EFFECT_ALLOW: "ok", RULE_EFFECT_ASK: "warn", RULE_EFFECT_DENY: "bad" };
const isAllow = ({ effect }: Values): boolean => effect === "RULE_EFFECT_ALLOW";
const SCOPE_NAMES = { USER: "All of my runs", AGENT: "All runs of one agent", CONVERSATION: "One conversation", RUN: "One run", STORE: "All runs of the store" };
const SCOPES = Object.entries(SCOPE_NAMES).map(([name, text]): Option => [`RULE_SCOPE_${name}`, text]);

/** Patterns of arguments, as rows: argument, comparison, value. */
function Patterns({ value, onValue }: { value: Values; onValue: (value: Values) => void }): VNode {
  const row = ({ argument = "", glob, equalsJson = "" }: Values, onRow: (row: Values) => void, number: number): VNode => {
    const text = glob ?? (typeof equalsJson === "string" ? equalsJson : JSON.stringify(equalsJson));
    const write = (isGlob: boolean, to: string, of = argument): void => onRow(isGlob ? { argument: of, glob: to } : { argument: of, equalsJson: numberOr(to) });
    const isGlob = glob !== undefined;
    return (
      <div class="pattern">
        <input aria-label={`Argument ${number}`} placeholder="Argument" value={argument} onInput={(event) => write(isGlob, text, event.currentTarget.value)} />
        <select aria-label={`Comparison ${number}`} value={isGlob ? "glob" : "equals"} onChange={(event) => write(event.currentTarget.value === "glob", text)}>
          <Options all={[["equals", "equals"], ["glob", "matches"]]} />
        </select>
        <input aria-label={`Value ${number}`} placeholder={isGlob ? "*@example.com" : "Value"} value={text} onInput={(event) => write(isGlob, event.currentTarget.value)} />
      </div>
    );
  };
  return <Several all={value["arguments"] ?? []} onAll={(all) => onValue({ ...value, arguments: all })} blank={{ argument: "", equalsJson: "" }} add="Add an argument" row={row} />;
}

/** Numbers, true, false and null are values; other texts are strings. */
function numberOr(text: string): unknown {
  return /^(-?\d+(\.\d+)?|true|false|null)$/.test(text) ? JSON.parse(text) : text;
}

const EFFECT_OPTIONS: Option[] = [["RULE_EFFECT_ASK", "Ask: a person approves each call"], ["RULE_EFFECT_ALLOW", "Allow: calls run without an approval"], ["RULE_EFFECT_DENY", "Deny: calls are refused"]];
const FIELDS: FieldSpec[] = [
  { at: "effect", label: "Effect", kind: "choice", options: EFFECT_OPTIONS },
  { at: "toolName", label: "Tool", kind: "suggest", half: true, load: async () => [["*", "all tools"], ...(await toolOptions())], hint: "A name, * for all tools, or name.* for the tools of a source." },
  { at: "scope", label: "Applies to", kind: "select", half: true, options: SCOPES },
  { at: "scopeId", label: "Agent", kind: "select", half: true, load: async () => (await agentOptions()).map(([name, label]): Option => [name || "default", label]), when: ({ scope }) => scope === "RULE_SCOPE_AGENT" },
  { at: "scopeId", label: "ID of the run or conversation", half: true, when: ({ scope }) => scope === "RULE_SCOPE_RUN" || scope === "RULE_SCOPE_CONVERSATION" },
  { at: "arguments", label: "Only calls with these arguments", kind: "own", view: (props) => <Patterns {...props} /> },
  { at: "expireTime", label: "Ends", kind: "moment", half: true, hint: "Without a time, the rule applies until it is revoked." },
  { at: "usesMax", label: "Maximum number of calls", kind: "number", half: true, placeholder: "unlimited", when: isAllow },
  { at: "itemsMax", label: "Maximum number of items in a call", kind: "number", half: true, placeholder: "2", when: isAllow },
  { at: "includesDestructive", label: "Also destructive tools", kind: "check", when: (value) => isAllow(value) && String(value["toolName"] ?? "").includes("*") },
  { at: "reason", label: "Reason", hint: "Why the rule exists." },
];

function whereOf({ scope = "RULE_SCOPE_UNSPECIFIED", scopeId = "", userId }: RuleJson): string {
  if (scope === "RULE_SCOPE_STORE") return "all runs";
  if (scope === "RULE_SCOPE_USER") return `runs of ${userId}`;
  return `${short(scope, "RULE_SCOPE_")} ${scopeId.slice(-12)}`;
}

/** The arguments that a rule requires, such as to matches *@acme.example. */
const onlyOf = ({ arguments: all = [] }: RuleJson): string => all.map(({ argument, glob, equalsJson }) => (glob === undefined ? `${argument} is ${JSON.stringify(unpack({ equalsJson }).equalsJson)}` : `${argument} matches ${glob}`)).join(" and ");

const blank = (effect: string): Values => ({ effect: `RULE_EFFECT_${effect}`, scope: "RULE_SCOPE_USER", toolName: "", arguments: [], reason: "" });

/** What applies to calls that no rule matches. */
const Defaults = (): VNode => (
  <>
    <h2>Without a rule</h2>
    <Table
      name="Without a rule"
      items={["TOOL_CATEGORY_SAFE", "TOOL_CATEGORY_SENSITIVE", "TOOL_CATEGORY_DESTRUCTIVE"] as const}
      columns={[{ name: "Tools", size: 150, of: (category) => <Care category={category} /> }, { name: "Calls", of: (category) => (category === "TOOL_CATEGORY_SAFE" ? "run at once" : "need an approval") }]}
    />
  </>
);

export const rules: Resource<RuleJson> = {
  path: "rules",
  lead: "A rule decides whether calls of a tool run, need an approval or are refused. The strictest matching rule applies.",
  declared: ({ name, ruleId }) => ["rule", name || (ruleId ?? "")],
  empty: "No rules. Create one here, or with an approval in the inbox.",
  list: paged("rules", (page, filters) => pawl.rules.listRules({ ...page, includeEnded: !!filters["ended"], allUsers: !!filters["everybody"] })),
  filters: [{ name: "ended", label: "Show ended", on: true }, { name: "everybody", label: "All users", on: true }],
  firsts: [["Allow", "Calls run without an approval.", blank("ALLOW")], ["Ask", "A person approves each call, also of a safe tool.", blank("ASK")], ["Deny", "Calls are refused.", blank("DENY")]],
  after: () => <Defaults />,
  id: ({ ruleId }) => ruleId ?? "", title: (rule) => `${sentence(short(rule.effect, "RULE_EFFECT_"))} ${rule.toolName === "*" ? "all tools" : rule.toolName} in ${whereOf(rule)}`,
  about: ({ reason }) => reason,
  columns: [
    { name: "Tool", icon: () => "rules", of: ({ toolName }) => (toolName === "*" ? "all tools" : toolName), under: (rule) => cut([onlyOf(rule), rule.reason].filter(Boolean).join(" · ")) },
    { name: "Effect", size: 80, priority: 1, of: ({ effect = "" }) => <Badge tone={EFFECTS[effect] ?? "grey"}>{short(effect, "RULE_EFFECT_")}</Badge> },
    { name: "Where", size: 170, priority: 1, of: whereOf },
    { name: "Only if", detailed: true, of: (rule) => cut(onlyOf(rule)) },
    { name: "Ends", size: 120, priority: 1, of: ({ expireTime, revokeTime, suspended }) => (revokeTime ? "revoked" : suspended ? "suspended" : (time(expireTime) ?? <span class="quiet">no end</span>)) },
    { name: "Uses", size: 80, priority: 3, num: true, of: ({ uses = 0, usesMax }) => (usesMax ? `${uses} of ${usesMax}` : uses) },
    { name: "By", size: 90, priority: 3, of: ({ userId }) => userId },
    { name: "Made", detailed: true, of: ({ createTime }) => time(createTime) },
  ],
  make: {
    name: "New rule", method: "tool.v1.RuleService/CreateRule", value: () => blank("ASK"),
    save: async (rule) => void (await pawl.rules.createRule({ requestId: requestId(), rule })),
    fields: FIELDS,
  },
  actions: [{ name: "Revoke", method: "tool.v1.RuleService/RevokeRule", bad: true, when: ({ revokeTime }) => !revokeTime, run: async ({ ruleId = "" }) => (await pawl.rules.revokeRule({ ruleId }), GONE) }],
  below: ({ toolName = "" }) => <p><a href={toolName.includes("*") ? "/audit" : `/audit?tool=${toolName}`}>Calls in the audit log</a></p>,
};
