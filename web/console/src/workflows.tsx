/** The pages of workflows: their list, the editor, and a workflow with its graph, versions and runs. */

import { encode, requestId, type WorkflowFaultJson, type WorkflowVersionJson } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { aboutOf } from "./about";
import { removal } from "./actions";
import { Badge, Skeleton } from "./design/parts";
import type { Editing } from "./editor";
import { Graph, Sketch } from "./flow";
import { blank, fieldsOf, type Schema } from "./form";
import { cut, time } from "./format";
import { graphOf } from "./graph";
import { parse, unpack } from "./json";
import { Below, paged, type Resource, useRead } from "./resource";
import { duration, LastRuns, LatestRuns } from "./runs";
import { go, pawl } from "./state";
import TEMPLATE from "./template.yaml?raw";
import { visible } from "./visible";

const SAVE = "agent.v1.WorkflowService/SaveWorkflow";
const PAUSE_MS = 400;

let yaml: typeof import("./yaml") | undefined;
const loadYaml = async (): Promise<void> => void (yaml ??= await import("./yaml"));

/** Reads JSON or YAML. */
function read(text: string): unknown {
  try {
    return parse(text);
  } catch (error) {
    if (!yaml || /^\s*{/.test(text)) throw error;
    return yaml.parse(text);
  }
}

/** Writes YAML, or JSON if there are integers that YAML would round. */
function written(definition: unknown): unknown {
  return yaml && !/\d{16}/.test(JSON.stringify(definition)) ? yaml.stringify(definition, { lineWidth: 0 }) : definition;
}

const editing = {
  method: SAVE, plain: true,
  parse: read,
  beside: (value, text) => <Check definition={value} text={text} />,
  save: async (definition) => {
    const { workflow, created } = await pawl.workflows.saveWorkflow({ definitionJson: encode(definition) });
    return created ? `Saved ${workflow?.name}, version ${workflow?.version}.` : `Version ${workflow?.version} is the same.`;
  },
} satisfies Partial<Editing<unknown>>;

/** Returns the line of a fault's path, such as nodes.sum.tool, or of the nearest part above it. */
function lineOf(text: string, path: string): number | undefined {
  if (!yaml) return undefined;
  const lines = new yaml.LineCounter();
  const read = yaml.parseDocument(text, { lineCounter: lines });
  for (const parts = path.split(/[.[\]]+/).filter(Boolean); parts.length; parts.pop()) {
    const found = read.getIn(parts.map((part) => (/^\d+$/.test(part) ? Number(part) : part)), true) as { range?: [number, number, number] } | undefined;
    if (found?.range) return lines.linePos(found.range[0]).line;
  }
  return undefined;
}

/** Selects a line of the editor. */
function select(line: number): void {
  const area = document.querySelector<HTMLTextAreaElement>("textarea[data-json]");
  const ends = (area?.value ?? "").split("\n").slice(0, line).map((each) => each.length + 1);
  const end = ends.reduce((sum, each) => sum + each, -1);
  area?.focus();
  area?.setSelectionRange(end - (ends.at(-1) ?? 1) + 1, end);
}

/** The faults of a definition while it is written, and the graph of its last valid version. */
function Check({ definition, text }: { definition: unknown; text: string }): VNode {
  const json = definition === undefined ? "" : JSON.stringify(definition);
  const [faults, setFaults] = useState<WorkflowFaultJson[]>();
  const [graph, setGraph] = useState<ReturnType<typeof graphOf>>();
  useEffect(() => {
    if (!json) return setFaults([{ message: "This is neither JSON nor YAML with a mapping." }]);
    let isStale = false;
    const check = (): unknown =>
      pawl.workflows.saveWorkflow({ definitionJson: encode(definition), validateOnly: true }).then(
        (found) => isStale || (setFaults(found.faults ?? []), found.mermaid && setGraph(graphOf(found.mermaid))),
        (error: Error) => isStale || setFaults([{ message: error.message }]),
      );
    const timer = setTimeout(check, PAUSE_MS);
    return () => void ((isStale = true), clearTimeout(timer));
  }, [json]);
  return (
    <div class="panel">
      <div class="row" role="status">
        {!faults ? "Checking ..." : faults.length ? <Badge tone="bad">{faults.length} {faults.length > 1 ? "problems" : "problem"}</Badge> : <Badge tone="ok">Valid</Badge>}
        <small class="quiet">{faults?.length === 0 ? "All tools, agents and expressions exist." : faults && graph && "The graph shows the last valid version."}</small>
      </div>
      <ul class="faults">
        {faults?.map(({ path = "", message, hint }, key) => {
          const line = lineOf(text, path);
          return (
            <li key={key}>
              {path && <code>{visible(path)}</code>} {line && <button type="button" class="plain small" onClick={() => select(line)}>Line {line}</button>}
              <p>{visible(message ?? "")}</p>
              {hint && <p class="quiet">{visible(hint)}</p>}
            </li>
          );
        })}
      </ul>
      {graph && <Graph {...graph} />}
    </div>
  );
}

export const workflows: Resource<WorkflowVersionJson> = {
  path: "workflows",
  lead: "A workflow is a graph of steps: tools, agents, questions, conditions and maps.",
  empty: "No workflows. Create one here, or save a file with pawl workflows save.",
  declared: ({ name }) => ["workflow", name ?? ""],
  list: paged("workflows", async (page) => (await loadYaml(), pawl.workflows.listWorkflows(page))),
  id: ({ name }) => name ?? "",
  get: async (name) => (await loadYaml(), (await pawl.workflows.getWorkflow({ name })).workflow),
  about: ({ description }) => description,
  columns: [
    { name: "Name", icon: () => "workflows", of: ({ name }) => name, under: ({ description }) => cut(description) },
    { name: "Steps", size: 200, priority: 2, listed: true, of: (each) => <Shape name={each.name ?? ""} version={each.version ?? 0} /> },
    { name: "Last runs", size: 276, priority: 1, listed: true, of: ({ name = "" }) => <LastRuns workflow={name} /> },
    { name: "Version", size: 80, priority: 3, of: ({ version }) => `v${version}` },
    { name: "Nodes", detailed: true, of: ({ nodeCount }) => nodeCount },
    { name: "Saved", size: 110, priority: 3, of: ({ createTime }) => time(createTime) },
    { name: "By", detailed: true, of: ({ createUserId }) => createUserId },
    { name: "Agents", detailed: true, of: ({ asTool }) => asTool && "can call it as a tool" },
  ],
  make: { ...editing, name: "New workflow", value: () => TEMPLATE },
  edit: { ...editing, name: "Edit workflow", value: ({ definitionJson }) => written(unpack({ definitionJson }).definitionJson) },
  start: {
    name: "Start", submit: "Start run", dialog: ({ name, version }) => `Start ${name}, version ${version}`, method: "agent.v1.WorkflowService/StartWorkflow", plain: true,
    value: (each) => blank(inputOf(each)), fields: (each) => fieldsOf(inputOf(each), {}),
    save: async (input, { name = "", version = 0 }) => {
      const { run } = await pawl.workflows.startWorkflow({ requestId: requestId(), name, version, inputJson: encode(input) });
      go(`/workflows/runs/${run?.runId}`);
    },
  },
  actions: [removal("Delete", "agent.v1.WorkflowService/DeleteWorkflow", ({ name = "" }) => pawl.workflows.deleteWorkflow({ name }))],
  below: (workflow) => <Workflow key={workflow.version} workflow={workflow} />,
};

function inputOf({ inputSchemaJson }: WorkflowVersionJson): Schema | undefined {
  return unpack({ inputSchemaJson }).inputSchemaJson as Schema | undefined;
}

function useGraph(name: string, version: number): ReturnType<typeof graphOf> | undefined {
  const [found] = useRead(() => pawl.workflows.getWorkflow({ name, version }), [name, version]);
  return found && graphOf(found.mermaid);
}

function Shape({ name, version }: { name: string; version: number }): VNode | null {
  const graph = useGraph(name, version);
  return graph ? <Sketch {...graph} /> : null;
}

function Workflow({ workflow: { name = "", version = 0 } }: { workflow: WorkflowVersionJson }): VNode {
  const [shown, setShown] = useState(version);
  const graph = useGraph(name, shown);
  const [last] = useRead(async () => {
    const [run] = (await pawl.agent.listRuns({ workflow: name, pageSize: 1 })).runs ?? [];
    return run?.workflow?.version === version ? pawl.workflows.getExecution({ runId: run.runId ?? "" }) : undefined;
  });
  const states = new Map(shown === version ? last?.nodes?.map(({ path, state }) => [path, state]) : []);
  const nodes = graph?.nodes.map((node) => ({ ...node, ...(states.get(node.path) && { state: states.get(node.path)! }) }));
  return (
    <>
      {shown !== version && <p><Badge tone="warn">Graph of version {shown}</Badge></p>}
      {graph && nodes ? <Graph nodes={nodes} edges={graph.edges} {...(states.size && { onChoose: (path) => go(`/workflows/runs/${last?.run?.runId}?node=${encodeURIComponent(path)}`) })} /> : <Skeleton lines={3} />}
      {states.size > 0 && <p class="quiet">With the states of the <a href={`/workflows/runs/${last?.run?.runId}`}>latest run</a>.</p>}
      <LatestRuns
        of={{ workflow: name }}
        name={(run) => aboutOf(run).replace(`${name}: `, "")}
        more={[{ name: "Duration", size: 100, num: true, priority: 3, of: duration }, { name: "Version", size: 80, priority: 3, of: (run) => `v${run.workflow?.version}` }]}
      />
      <Below<WorkflowVersionJson>
        name="Versions"
        method="agent.v1.WorkflowService/ListWorkflowVersions"
        load={async () => (await pawl.workflows.listWorkflowVersions({ name })).workflows}
        columns={[
          { name: "Version", of: (each) => `v${each.version}, ${each.nodeCount} nodes`, under: (each) => cut(each.description) },
          { name: "Saved", size: 110, priority: 2, of: ({ createTime }) => time(createTime) },
          { name: "By", size: 110, priority: 3, of: ({ createUserId }) => createUserId },
        ]}
        act={(each) => <button class="second small" disabled={each.version === shown} onClick={() => setShown(each.version ?? 0)}>Show graph</button>}
      />
    </>
  );
}
