/** The list of runs, and the parts of a run that other pages show. */

import type { RunJson, RunStateJson } from "@pawl/client";
import type { VNode } from "preact";

import { Badge, toneOf } from "./design/parts";
import { cut, time, tokenCount } from "./format";
import type { Resource } from "./resource";
import { lasted, pawl, STATES, word } from "./state";

const ACTIVE: RunStateJson[] = ["RUN_STATE_QUEUED", "RUN_STATE_RUNNING", "RUN_STATE_WAITING", "RUN_STATE_CANCELLING"];

export const runs: Resource<RunJson> = {
  path: "runs",
  lead: "A run is the work of an agent on one message, of a workflow, or of a job.",
  empty: "No matching runs. Runs from the chat, schedules, triggers and programs appear here.",
  live: true,
  list: async (pageToken, { state = "", agent = "", workflow = "", parent = "", conversation = "" }) => {
    const states = state === "active" ? ACTIVE : (Object.keys(STATES).filter((each) => STATES[each] === state) as RunStateJson[]);
    const page = await pawl.agent.listRuns({ pageSize: 50, pageToken, states, agent, workflow, parentRunId: parent, conversationId: conversation });
    return { items: page.runs ?? [], next: page.nextPageToken };
  },
  filters: [
    { name: "state", label: "State", options: ["active", ...Object.values(STATES)] },
    { name: "agent", label: "Agent" },
    { name: "workflow", label: "Workflow" },
    { name: "parent", label: "Parent run", linked: true },
    { name: "conversation", label: "Conversation", linked: true },
  ],
  id: ({ runId }) => runId ?? "",
  columns: [
    { name: "Answer", of: (run) => cut(run.failure?.message ?? run.outputText ?? run.waiting?.sentence) || `Run ${run.runId?.slice(-8)}` },
    { name: "State", size: 140, of: (run) => <State run={run} /> },
    { name: "Agent", size: 150, priority: 2, of: kindOf },
    { name: "Started", size: 110, priority: 2, of: ({ createTime }) => time(createTime) },
    { name: "Duration", size: 90, priority: 3, num: true, of: duration },
    { name: "Tokens", size: 90, priority: 3, num: true, of: tokens },
    { name: "Run", size: 100, priority: 3, of: ({ runId }) => <code>{runId?.slice(-8)}</code> },
  ],
};

/** The agent, workflow, job or goal of a run. */
export function kindOf({ workflow, job, goal, agent }: RunJson): string {
  return workflow ? `workflow ${workflow.name}` : job ? `job ${job.toolName}` : goal ? "goal" : (agent?.name ?? "default");
}

function duration({ createTime = "", endTime }: RunJson): string {
  return endTime ? lasted(Math.max(0, Date.parse(endTime) - Date.parse(createTime)) / 1000) : "";
}

export function Fact({ name, value }: { name: string; value: unknown }): VNode | null {
  if (!value) return null;
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value as VNode}</dd>
    </div>
  );
}

export function State({ run }: { run: RunJson }): VNode {
  return <Badge tone={toneOf(run.state)}>{word(run.state)}</Badge>;
}

export function tokens(run: RunJson): string {
  const sum = tokenCount(run.usage);
  return sum ? sum.toLocaleString() : "";
}
