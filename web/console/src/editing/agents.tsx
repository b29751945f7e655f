/** Agents: their list, the form with the tool picker, versions and usage. */

import type { AgentVersionJson, ToolJson } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { aboutOf } from "../about";
import { Conversation, type Embedding } from "../chat";
import { Icon } from "../design/icons";
import { Badge, type Tone } from "../design/parts";
import { Choice, type FieldSpec, get, type Option, set, type Values } from "../fields";
import { cut, time } from "../format";
import { removal } from "../actions";
import { pack } from "../json";
import { Below, paged, type Resource } from "../resource";
import { LastRuns, LatestRuns, tokens } from "../runs";
import { draft, go, pawl, who } from "../state";
import { visible } from "../visible";

const EFFORTS: Option[] = [["", "As the model decides"], ...["none", "minimal", "low", "medium", "high", "xhigh"].map((each): Option => [`REASONING_EFFORT_${each.toUpperCase()}`, each])];

async function models(): Promise<Option[]> {
  const { agents = [] } = await pawl.agents.listAgents({ pageSize: 200 });
  const names = [who.value?.deployment?.model, ...agents.map(({ definition }) => definition?.options?.model)];
  return [...new Set(names.filter((name): name is string => !!name))].map((name) => [name, name]);
}

const CARE: Record<string, [Tone, string]> = { TOOL_CATEGORY_SAFE: ["ok", "Safe"], TOOL_CATEGORY_SENSITIVE: ["warn", "Asks first"], TOOL_CATEGORY_DESTRUCTIVE: ["bad", "Destructive"] };

/** Whether calls of a tool require approval. Only tools that do are highlighted. */
export function Care({ category = "" }: { category?: string | undefined }): VNode {
  const [tone, text] = CARE[category] ?? ["grey", "Unknown"];
  return tone === "ok" ? <span class="quiet">{text}</span> : <Badge tone={tone}>{text}</Badge>;
}

export const sourceOf = ({ source = "" }: ToolJson): string => source.replace(/^module:(.*\.)?/, "").replaceAll("_", " ").replace("builtin", "built in");

function ToolPicker({ value, onValue, id }: { value: Values; onValue: (value: Values) => void; id: string }): VNode {
  const chosen: string[] = get(value, "tools.names") ?? [];
  const others = [...(get(value, "tools.sources") ?? []).map((name: string) => `all of ${name}`), ...(get(value, "tools.patterns") ?? [])];
  const [kind, setKind] = useState(get(value, "options.withoutTools") ? "none" : chosen.length || others.length ? "some" : "all");
  const [tools, setTools] = useState<ToolJson[]>([]);
  const [words, setWords] = useState("");
  // Those that were chosen when the form opened come first.
  const [first] = useState(chosen);
  const rank = ({ definition }: ToolJson): number => Number(!first.includes(definition?.name ?? ""));
  useEffect(() => void pawl.tools.listTools({ pageSize: 200 }).then(({ tools: all = [] }) => setTools(all.toSorted((one, other) => rank(one) - rank(other))), () => {}), []);
  const choose = (to: string): void => {
    setKind(to);
    const without = set(value, "options.withoutTools", to === "none" || undefined);
    onValue(to === "some" ? without : set(without, "tools", undefined));
  };
  const shown = tools.filter(({ definition }) => `${definition?.name} ${definition?.description}`.toLowerCase().includes(words.toLowerCase()));
  return (
    <>
      <Choice
        name={`${id}-tools`}
        value={kind}
        onValue={choose}
        all={[["all", "All tools that the user may call"], ["some", "Only the tools chosen here"], ["none", "No tools"]]}
      />
      {kind === "some" && (
        <>
          <div class="chips">
            {chosen.map((name) => <button key={name} type="button" class="chip" aria-label={`Remove ${name}`} onClick={() => onValue(set(value, "tools.names", chosen.filter((each) => each !== name)))}>{visible(name)} <Icon name="close" /></button>)}
            {!chosen.length && <span class="quiet">No tool is chosen yet.</span>}
          </div>
          {tools.length > 8 && <input type="search" aria-label="Filter the tools" placeholder={`Search ${tools.length} tools`} value={words} onInput={(event) => setWords(event.currentTarget.value)} />}
          <div class="options" tabIndex={0} role="group" aria-label="Chosen tools">
            {shown.map(({ definition: { name = "", description = "", category } = {}, source = "" }) => (
              <label key={name}>
                <input
                  type="checkbox"
                  checked={chosen.includes(name)}
                  onChange={(event) => onValue(set(value, "tools.names", event.currentTarget.checked ? [...chosen, name] : chosen.filter((each) => each !== name)))}
                />
                <span>
                  <b>{visible(name)}</b>
                  <small class="cut quiet">{visible(description)}</small>
                </span>
                {source !== "builtin" && <small class="quiet">{visible(sourceOf({ source }))}</small>}
                <Care category={category} />
              </label>
            ))}
          </div>
          {!!others.length && <span class="hint">Also {others.join(", ")}. Edit these as JSON.</span>}
        </>
      )}
    </>
  );
}

const FIELDS: FieldSpec[] = [
  { at: "card.description", label: "Description", hint: "Shown to people who choose an agent." },
  { at: "options.instructions", label: "Instructions", kind: "area", hint: "Describe the task and how to do it. Pawl adds guidelines on questions, approvals and background work." },
  { at: "options.model", label: "Model", kind: "suggest", half: true, load: models, placeholder: "The deployment's default" },
  { at: "options.limits.roundsMax", label: "Maximum number of rounds", kind: "number", half: true, placeholder: "10" },
  { at: "tools", label: "Tools", kind: "own", view: (props) => <ToolPicker {...props} /> },
  { at: "options.modelFallbacks", label: "Fallback models", kind: "lines", more: true, half: true, hint: "Used in this order when the model is unavailable." },
  { at: "options.reasoningEffort", label: "Reasoning effort", kind: "select", more: true, half: true, options: EFFORTS },
  { at: "options.temperature", label: "Temperature", kind: "number", more: true, half: true },
  { at: "options.limits.totalTokensMax", label: "Token budget of a run", kind: "number", more: true, half: true },
  { at: "dailyTokensMax", label: "Tokens per day", kind: "number", more: true, half: true, hint: "For all runs of the agent together." },
  { at: "delegatesTo", label: "Delegates to", kind: "lines", more: true, half: true, hint: "Agents that its runs may start, one per line." },
  { at: "allowedRoles", label: "Allowed roles", kind: "lines", more: true, half: true, hint: "Without a role, every user may use it." },
  { at: "card.examplePrompts", label: "Example prompts", kind: "lines", more: true, half: true },
];
const NAME: FieldSpec = { at: "name", label: "Name", hint: "Letters, digits, - and _. The agent default drives runs without an agent." };

/** The built-in default agent is not saved. It has no versions and cannot be deleted. */
const isSaved = ({ createTime }: AgentVersionJson): boolean => !!createTime;

/** Name of the draft that a test uses, only until its run has started. */
const TRIED = "try-it";

/** A chat with the unsaved agent in the form. */
function Try({ definition }: { definition: Values | undefined }): VNode {
  const [conversationId, setConversation] = useState("");
  const within: Embedding = {
    agent: String(definition?.["name"] || "the agent"),
    start: async (run) => {
      await pawl.agents.updateDraft({ definition: pack({ ...definition, name: TRIED, allowedRoles: [] }) });
      const started = await run(`draft/${TRIED}`);
      await pawl.agents.deleteDraft({ name: TRIED });
      return started;
    },
    onOpen: setConversation,
  };
  return (
    <div class="panel try">
      <div class="row">
        <h2>Try it</h2>
        <span class="quiet">unsaved version</span>
        <span class="space" />
        {conversationId && <button class="second small" onClick={() => setConversation("")}>Start over</button>}
      </div>
      {!conversationId && <p class="quiet">Write to {within.agent} as it is in this form. Its tools really run, and sensitive ones ask first.</p>}
      {!conversationId && <div class="chips">{(get(definition ?? {}, "card.examplePrompts") ?? []).map((text: string) => <button key={text} type="button" class="chip" onClick={() => (draft.value = text)}>{visible(text)}</button>)}</div>}
      <Conversation key={conversationId} conversationId={conversationId} within={within} />
    </div>
  );
}

const editing = {
  method: "agent.v1.AgentRegistryService/UpdateAgent",
  beside: (definition: Values | undefined): VNode => <Try definition={definition} />,
  save: async (definition: object) => {
    const { agent, unmatched = [] } = await pawl.agents.updateAgent({ definition });
    return `Saved version ${agent?.version}.${unmatched.length ? ` No tool matches ${unmatched.join(", ")}.` : ""}`;
  },
};

export const agents: Resource<AgentVersionJson> = {
  path: "agents",
  lead: "An agent is a model with instructions and tools. Each save makes a new version; runs in progress keep theirs.",
  declared: ({ definition, draft: isDraft }) => [isDraft ? "" : "agent", definition?.name ?? ""],
  empty: "No agents yet. Runs use the default agent. Create one here or with pawl apply.",
  list: paged("agents", (page, filters) => pawl.agents.listAgents({ ...page, drafts: !!filters["drafts"] })),
  tabs: { name: "drafts", all: [["", "Published"], ["1", "My drafts"]] },
  id: ({ definition }) => definition?.name ?? "",
  get: async (name) => (await pawl.agents.getAgent({ name })).agent,
  about: ({ definition }) => definition?.card?.description,
  columns: [
    { name: "Name", icon: () => "agents", of: ({ definition }) => definition?.name, under: (agent) => cut(agent.definition?.card?.description) || (!isSaved(agent) && "Built in. Used by runs that name no agent.") },
    { name: "Model", size: 140, priority: 2, of: ({ definition }) => definition?.options?.model || <span class="quiet" title="The default of the deployment">{who.value?.deployment?.model ?? "default"}</span> },
    { name: "Tools", size: 120, priority: 1, listed: true, of: ({ toolNames }) => (toolNames?.length ? `${toolNames.length} ${toolNames.length > 1 ? "tools" : "tool"}` : "all tools") },
    { name: "Last runs", size: 276, priority: 1, listed: true, of: ({ definition: { name = "" } = {} }) => <LastRuns agent={name} /> },
    { name: "Version", size: 110, priority: 3, of: ({ version, draft: isDraft }) => (isDraft ? <Badge tone="accent">draft</Badge> : version && `v${version}`), under: ({ createTime }) => time(createTime) },
    { name: "Saved", detailed: true, of: ({ createTime }) => time(createTime) },
    { name: "By", detailed: true, of: ({ createUserId }) => createUserId },
  ],
  make: { ...editing, name: "New agent", value: () => ({ name: "", options: { instructions: "" }, tools: { names: [] } }), fields: [NAME, ...FIELDS] },
  edit: { ...editing, name: "Edit agent", value: ({ definition }) => definition, fields: FIELDS },
  actions: [
    { name: "Chat", method: "agent.v1.AgentService/StartRun", main: true, run: async ({ definition }) => go(`/?agent=${definition?.name}`) },
    { ...removal<AgentVersionJson>("Delete", "agent.v1.AgentRegistryService/DeleteAgent", ({ definition }) => pawl.agents.deleteAgent({ name: definition?.name ?? "" })), when: isSaved },
  ],
  below: (agent) => <AgentPage key={agent.version} agent={agent} />,
};

function AgentPage({ agent }: { agent: AgentVersionJson }): VNode {
  const { definition: { name = "", options } = {}, toolNames = [] } = agent;
  return (
    <>
      <h2>Instructions</h2>
      {options?.instructions ? <p class="panel prose">{visible(options.instructions)}</p> : <p class="quiet">None of its own.</p>}
      <h2>Tools</h2>
      <div class="chips">
        {toolNames.map((tool) => <a key={tool} class="chip" href={`/tools/${encodeURIComponent(tool)}`}>{visible(tool)}</a>)}
        {!toolNames.length && <span class="quiet">{options?.withoutTools ? "None." : "All that the user may call."}</span>}
      </div>
      <LatestRuns of={{ agent: name }} name={aboutOf} more={[{ name: "Tokens", size: 90, priority: 3, num: true, of: tokens }]} />
      {(agent.version ?? 0) > 1 && (
        <Below<AgentVersionJson>
          name="Versions"
          method="agent.v1.AgentRegistryService/ListAgentVersions"
          load={async () => (await pawl.agents.listAgentVersions({ name })).agents}
          columns={[
            { name: "Version", size: 110, of: ({ version }) => `v${version}` },
            { name: "Model", priority: 2, of: ({ definition }) => definition?.options?.model || "default" },
            { name: "Saved", size: 120, of: ({ createTime }) => time(createTime) },
            { name: "By", size: 110, of: ({ createUserId }) => createUserId },
          ]}
        />
      )}
    </>
  );
}
