/** The pages of a workflow: its versions, its runs and the form that starts one. */

import { encode, requestId, type RunJson, type WorkflowVersionJson } from "@pawl/client";
import type { VNode } from "preact";

import type { Schema } from "./form";
import { unpack } from "./json";
import { Below, FormButton, type Resource } from "./resource";
import { State } from "./runs";
import { ago, go, may, moment, pawl } from "./state";
import { visible } from "./visible";

const time = (at: string | undefined): VNode | undefined => (at ? <time title={moment(at)}>{ago(at)}</time> : undefined);

export const workflows: Resource<WorkflowVersionJson> = {
  path: "workflows",
  empty: "No workflows. Save one with pawl workflows save or pawl apply.",
  list: async (pageToken) => {
    const page = await pawl.workflows.listWorkflows({ pageSize: 50, pageToken });
    return { items: page.workflows ?? [], next: page.nextPageToken };
  },
  id: ({ name }) => name ?? "",
  get: async (name) => (await pawl.workflows.getWorkflow({ name })).workflow,
  columns: [
    { name: "Name", of: ({ name }) => name },
    { name: "Version", of: ({ version }) => version },
    { name: "Nodes", of: ({ nodeCount }) => nodeCount },
    { name: "Saved", of: ({ createTime }) => time(createTime) },
    { name: "By", of: ({ createUserId }) => createUserId },
    { name: "Description", of: ({ description }) => <span class="cut">{visible(description ?? "").slice(0, 160)}</span> },
  ],
  below: (workflow) => (
    <>
      {may("agent.v1.WorkflowService/StartWorkflow") && <Start workflow={workflow} />}
      <Below<RunJson>
        name="Latest runs"
        method="agent.v1.AgentService/ListRuns"
        load={async () => (await pawl.agent.listRuns({ workflow: workflow.name ?? "", order: "RUN_ORDER_NEWEST_FIRST", pageSize: 20 })).runs}
        columns={[
          { name: "Run", of: ({ runId = "" }) => <a href={`/workflows/runs/${runId}`}>{runId.slice(-8)}</a> },
          { name: "State", of: (run) => <State run={run} /> },
          { name: "Version", of: (run) => run.workflow?.version },
          { name: "Started", of: ({ createTime }) => time(createTime) },
          { name: "Ended", of: ({ endTime }) => time(endTime) },
          { name: "Output", of: ({ failure, outputText }) => <span class="cut">{visible(failure?.message ?? outputText ?? "").slice(0, 160)}</span> },
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
