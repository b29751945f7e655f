/** The pages of a workflow: its versions, its runs and the form that starts one. */

import { encode, requestId, type RunJson, type WorkflowVersionJson } from "@pawl/client";
import type { VNode } from "preact";

import { FormButton } from "./editor";
import { cut, time } from "./format";
import type { Schema } from "./form";
import { unpack } from "./json";
import { Below, type Resource } from "./resource";
import { State } from "./runs";
import { go, may, pawl } from "./state";
import { visible } from "./visible";

export const workflows: Resource<WorkflowVersionJson> = {
  path: "workflows",
  lead: "A workflow is a graph of steps: tools, agents, questions, conditions and maps.",
  empty: "No workflows. Save one with pawl workflows save or pawl apply.",
  list: async (pageToken) => {
    const page = await pawl.workflows.listWorkflows({ pageSize: 50, pageToken });
    return { items: page.workflows ?? [], next: page.nextPageToken };
  },
  id: ({ name }) => name ?? "",
  get: async (name) => (await pawl.workflows.getWorkflow({ name })).workflow,
  columns: [
    { name: "Name", of: ({ name }) => name },
    { name: "Version", size: 90, of: ({ version }) => `v${version}` },
    { name: "Nodes", size: 80, priority: 3, num: true, of: ({ nodeCount }) => nodeCount },
    { name: "Description", priority: 2, listed: true, of: ({ description }) => cut(description) },
    { name: "Saved", size: 110, of: ({ createTime }) => time(createTime) },
    { name: "By", size: 110, priority: 3, of: ({ createUserId }) => createUserId },
  ],
  below: (workflow) => (
    <>
      {workflow.description && <p class="lead">{visible(workflow.description)}</p>}
      {may("agent.v1.WorkflowService/StartWorkflow") && <Start workflow={workflow} />}
      <Below<RunJson>
        name="Latest runs"
        method="agent.v1.AgentService/ListRuns"
        load={async () => (await pawl.agent.listRuns({ workflow: workflow.name ?? "", order: "RUN_ORDER_NEWEST_FIRST", pageSize: 20 })).runs}
        columns={[
          { name: "Run", size: 120, of: ({ runId = "" }) => <a href={`/workflows/runs/${runId}`}>{runId.slice(-8)}</a> },
          { name: "State", size: 140, of: (run) => <State run={run} /> },
          { name: "Version", size: 90, priority: 3, of: (run) => `v${run.workflow?.version}` },
          { name: "Started", size: 110, of: ({ createTime }) => time(createTime) },
          { name: "Ended", size: 110, priority: 3, of: ({ endTime }) => time(endTime) },
          { name: "Output", priority: 2, of: ({ failure, outputText }) => cut(failure?.message ?? outputText) },
        ]}
      />
    </>
  ),
};

/** The form for the input, which starts a run and opens its page. */
function Start({ workflow: { name = "", version = 0, inputSchemaJson } }: { workflow: WorkflowVersionJson }): VNode {
  const start = async (input: object): Promise<void> => {
    const { run } = await pawl.workflows.startWorkflow({ requestId: requestId(), name, version, inputJson: encode(input) });
    go(`/workflows/runs/${run?.runId}`);
  };
  return <FormButton name="Start" save="Start run" what="Input" schema={unpack({ inputSchemaJson }).inputSchemaJson as Schema | undefined} send={start} />;
}
