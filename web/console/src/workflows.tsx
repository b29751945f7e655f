/** The pages of workflows: their list, the editor, and a workflow with its graph, versions and runs. */

import { encode, requestId, type RunJson, type WorkflowFaultJson, type WorkflowVersionJson } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { removal } from "./actions";
import { Badge, Skeleton, toneOf } from "./design/parts";
import type { Editing } from "./editor";
import { Graph, Sketch } from "./flow";
import { blank, fieldsOf, type Schema } from "./form";
import { cut, time } from "./format";
import { graphOf } from "./graph";
import { parse, unpack } from "./json";
import { Below, paged, type Resource, useRead } from "./resource";
import { duration, State } from "./runs";
import { go, may, pawl, word } from "./state";
import { visible } from "./visible";

const SAVE = "agent.v1.WorkflowService/SaveWorkflow";
const PAUSE_MS = 400;
const RECENT = 6;
const TEMPLATE = `name: hello
description: Works something out, and asks a person before it ends.
input:
  type: object
  properties:
    expression: {type: string, title: Expression}
  required: [expression]
nodes:
  sum:
    kind: tool
    tool: calculate
    arguments: {expression: "\${input.expression}"}
  check:
    kind: human
    question: Is this right?
    options: ["yes", "no"]
    after: [sum]
  answer:
    kind: output
    value: "\${nodes.sum.output}"
    after: [check]
`;

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
  method: SAVE,
  plain: true,
  parse: read,
  beside: (value) => <Faults definition={value} />,
  save: async (definition) => {
    const { workflow, created } = await pawl.workflows.saveWorkflow({ definitionJson: encode(definition) });
    return created ? `Saved ${workflow?.name}, version ${workflow?.version}.` : `Version ${workflow?.version} is the same.`;
  },
} satisfies Partial<Editing<unknown>>;

/** The faults of a definition while it is written. */
function Faults({ definition }: { definition: unknown }): VNode {
  const text = definition === undefined ? "" : JSON.stringify(definition);
  const [faults, setFaults] = useState<WorkflowFaultJson[]>();
  useEffect(() => {
    if (!text) return setFaults([{ message: "This is neither JSON nor YAML with a mapping." }]);
    let isStale = false;
    const check = (): unknown =>
      pawl.workflows.saveWorkflow({ definitionJson: encode(definition), validateOnly: true }).then(
        (found) => isStale || setFaults(found.faults ?? []),
        (error: Error) => isStale || setFaults([{ message: error.message }]),
      );
    const timer = setTimeout(check, PAUSE_MS);
    return () => void ((isStale = true), clearTimeout(timer));
  }, [text]);
  return (
    <div class="panel" role="status">
      <h2>{!faults ? "Checking ..." : faults.length ? `${faults.length} ${faults.length > 1 ? "problems" : "problem"}` : <Badge tone="ok">Valid</Badge>}</h2>
      {faults?.length === 0 && <p class="quiet">All tools, agents and expressions exist and fit together.</p>}
      <ul class="faults">
        {faults?.map(({ path, message, hint }, key) => (
          <li key={key}>
            {path && <code>{visible(path)}</code>}
            <p>{visible(message ?? "")}</p>
            {hint && <p class="quiet">{visible(hint)}</p>}
          </li>
        ))}
      </ul>
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
  columns: [
    { name: "Name", of: ({ name }) => name, under: ({ description }) => cut(description) },
    { name: "Steps", size: 200, priority: 2, listed: true, of: (each) => <Shape name={each.name ?? ""} version={each.version ?? 0} /> },
    { name: "Last runs", size: 190, listed: true, of: ({ name = "" }) => <Last name={name} /> },
    { name: "Version", size: 80, priority: 3, of: ({ version }) => `v${version}` },
    { name: "Nodes", detailed: true, of: ({ nodeCount }) => nodeCount },
    { name: "Saved", size: 110, priority: 3, of: ({ createTime }) => time(createTime) },
    { name: "By", detailed: true, of: ({ createUserId }) => createUserId },
    { name: "Agents", detailed: true, of: ({ asTool }) => asTool && "can call it as a tool" },
  ],
  make: { ...editing, name: "New workflow", value: () => TEMPLATE },
  edit: { ...editing, name: "Edit workflow", value: ({ definitionJson }) => written(unpack({ definitionJson }).definitionJson) },
  start: {
    name: "Start",
    submit: "Start run",
    method: "agent.v1.WorkflowService/StartWorkflow",
    plain: true,
    value: (each) => blank(inputOf(each)),
    fields: (each) => fieldsOf(inputOf(each), {}),
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

/** The state of the last run, and the runs before it as dots, the newest on the right. */
function Last({ name }: { name: string }): VNode | null {
  const [found] = useRead(() => pawl.agent.listRuns({ workflow: name, pageSize: RECENT }), [name]);
  const [run] = found?.runs ?? [];
  if (!run) return found ? <span class="quiet">never ran</span> : null;
  return (
    <>
      <State run={run} /> <small class="quiet">{time(run.createTime)}</small>
      <span class="recent">
        {[...(found?.runs ?? [])].reverse().map(({ runId, state }) => (
          <a key={runId} href={`/workflows/runs/${runId}`} aria-label={`Run ${runId?.slice(-8)}: ${word(state)}`} title={word(state)}><i class={`dot ${toneOf(state)}`} /></a>
        ))}
      </span>
    </>
  );
}

function Workflow({ workflow: { name = "", version = 0, description } }: { workflow: WorkflowVersionJson }): VNode {
  const [shown, setShown] = useState(version);
  const graph = useGraph(name, shown);
  return (
    <>
      {description && <p class="lead">{visible(description)}</p>}
      <h2>Graph {shown !== version && <Badge tone="warn">version {shown}</Badge>}</h2>
      {graph ? <Graph {...graph} /> : <Skeleton lines={3} />}
      <Below<RunJson>
        name="Latest runs"
        method="agent.v1.AgentService/ListRuns"
        load={async () => (await pawl.agent.listRuns({ workflow: name, pageSize: 20 })).runs}
        columns={[
          { name: "Run", size: 120, of: ({ runId = "" }) => <a href={`/workflows/runs/${runId}`}>{runId.slice(-8)}</a> },
          { name: "State", size: 140, of: (run) => <State run={run} /> },
          { name: "Version", size: 90, priority: 3, of: (run) => `v${run.workflow?.version}` },
          { name: "Started", size: 110, of: ({ createTime }) => time(createTime) },
          { name: "Duration", size: 100, num: true, priority: 3, of: duration },
          { name: "Output", priority: 2, of: ({ failure, outputText, waiting }) => (failure ? <span class="fault">{cut(failure.message)}</span> : cut(outputText ?? waiting?.sentence)) },
        ]}
      />
      <Below<WorkflowVersionJson>
        name="Versions"
        method="agent.v1.WorkflowService/ListWorkflowVersions"
        load={async () => (await pawl.workflows.listWorkflowVersions({ name })).workflows}
        columns={[
          { name: "Version", size: 110, of: (each) => `v${each.version}` },
          { name: "Description", priority: 3, of: (each) => cut(each.description) },
          { name: "Nodes", size: 80, num: true, priority: 2, of: ({ nodeCount }) => nodeCount },
          { name: "Saved", size: 120, of: ({ createTime }) => time(createTime) },
          { name: "By", size: 120, priority: 2, of: ({ createUserId }) => createUserId },
        ]}
        act={(each) => <button class="second small" disabled={each.version === shown} onClick={() => setShown(each.version ?? 0)}>Show its graph</button>}
      />
    </>
  );
}
