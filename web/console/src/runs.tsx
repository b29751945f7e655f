/** The list of runs, and the parts of a run that other pages show. */

import { isEnded, type RunJson, type RunStateJson } from "@pawl/client";
import type { ComponentChildren, VNode } from "preact";

import { aboutOf } from "./about";
import { Badge, toneOf } from "./design/parts";
import type { Column } from "./design/table";
import { agentOptions, workflowOptions } from "./editing/options";
import { cut, plain, time, tokenCount } from "./format";
import { Below, paged, type Resource, useRead } from "./resource";
import { ago, clock, lasted, moment, pawl, STATES, word } from "./state";
import { visible } from "./visible";

const ACTIVE: RunStateJson[] = ["RUN_STATE_QUEUED", "RUN_STATE_RUNNING", "RUN_STATE_WAITING", "RUN_STATE_CANCELLING"];
const TABS: [string, string, RunStateJson[]][] = [
  ["", "All", []],
  ["active", "Active", ACTIVE],
  ["waiting", "Waiting", ["RUN_STATE_WAITING"]],
  ["failed", "Failed", ["RUN_STATE_FAILED", "RUN_STATE_EXPIRED", "RUN_STATE_NEEDS_ATTENTION"]],
  ["completed", "Completed", ["RUN_STATE_COMPLETED"]],
  ["stopped", "Stopped", ["RUN_STATE_CANCELLED"]],
];

export const runs: Resource<RunJson> = {
  path: "runs",
  lead: "A run is the work of an agent on one message, of a workflow, or of a job.",
  empty: "No matching runs. Runs from the chat, schedules, triggers and programs appear here.",
  live: true,
  list: paged("runs", (page, { state = "", agent = "", workflow = "", parent = "", conversation = "" }) => {
    const states = TABS.find(([name]) => name === state)?.[2] ?? (Object.keys(STATES).filter((each) => STATES[each] === state) as RunStateJson[]);
    return pawl.agent.listRuns({ ...page, pageSize: 50, states, agent, workflow, parentRunId: parent, conversationId: conversation });
  }),
  tabs: { name: "state", all: TABS.map(([name, label]) => [name, label] as const) },
  filters: [
    { name: "agent", label: "Agent", load: async () => [["default", ""], ...(await agentOptions())] },
    { name: "workflow", label: "Workflow", load: workflowOptions },
    { name: "parent", label: "Parent run", linked: true },
    { name: "conversation", label: "Conversation", linked: true },
  ],
  id: ({ runId }) => runId ?? "",
  columns: [
    { name: "Run", of: (run) => aboutOf(run) || `Run ${run.runId?.slice(-8)}`, under: came },
    { name: "State", size: 148, by: (run) => word(run.state), of: (run) => <State run={run} /> },
    { name: "Agent", size: 132, priority: 2, by: kindOf, of: (run) => (run.workflow ? "workflow" : run.job ? "job" : kindOf(run)) },
    { name: "Started", size: 108, priority: 2, by: ({ createTime = "" }) => createTime, of: ({ createTime }) => time(createTime) },
    { name: "Duration", size: 100, priority: 3, num: true, by: seconds, of: duration },
    { name: "Tokens", size: 92, priority: 3, num: true, by: (run) => tokenCount(run.usage), of: tokens },
  ],
};

/** The agent, workflow, job or goal of a run. */
export function kindOf({ workflow, job, goal, agent }: RunJson): string {
  return workflow ? `workflow ${workflow.name}` : job ? `job ${job.toolName}` : goal ? "goal" : (agent?.name ?? "default");
}

function seconds({ createTime = "", endTime }: RunJson): number {
  return Math.max(0, (endTime ? Date.parse(endTime) : clock.value) - Date.parse(createTime)) / 1000;
}

export function duration(run: RunJson): string {
  return lasted(seconds(run));
}

/** What came of a run: its failure, what it waits for, or its answer. */
function came({ failure, waiting, outputText }: RunJson): ComponentChildren {
  return failure ? <span class="fault">{cut(failure.message || failure.reason)}</span> : cut(waiting?.sentence || (/^[{[]/.test(outputText ?? "") ? "" : plain(outputText ?? "")));
}

/** Reasons to wait that end at the deadline, when the run continues. */
const CONTINUES = /_(TIME|PROVIDER|RATE)$/;

/** Why a run failed, with the node `at` which it failed, or why it waits and what resumes it. */
export function Why({ run, at }: { run: RunJson; at?: string | undefined }): VNode | null {
  const { state, failure, waiting } = run;
  if (failure || state === "RUN_STATE_FAILED" || state === "RUN_STATE_EXPIRED")
    return (
      <div class="why bad" role="alert">
        <strong>Why it failed{at ? ` at ${at}` : ""}</strong>
        <p>{visible(failure?.message || "It took too long.")}</p>
        {failure?.reason && <code>{failure.reason}</code>}
      </div>
    );
  if (isEnded(run) || !waiting?.sentence) return null;
  return (
    <div class="why">
      <strong>Why it waits</strong>
      <p>{visible(waiting.sentence)} {waiting.remedy && visible(waiting.remedy)}</p>
      <p class="quiet">
        {waiting.sinceTime && <>Since {ago(waiting.sinceTime)}. </>}
        {waiting.deadlineTime && <span title={moment(waiting.deadlineTime)}>{CONTINUES.test(waiting.reason ?? "") ? "Continues" : "Expires"} {ago(waiting.deadlineTime)}.</span>}
      </p>
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

/** The state of the last run of an agent or a workflow, and those before it as dots, the newest on the right. */
export function LastRuns(of: { agent: string } | { workflow: string }): VNode | null {
  const [found] = useRead(() => pawl.agent.listRuns({ ...of, pageSize: 6 }), [JSON.stringify(of)]);
  const [run] = found?.runs ?? [];
  if (!run) return found ? <span class="quiet">never ran</span> : null;
  return (
    <>
      <State run={run} /> <small class="quiet">{time(run.createTime)}</small>
      <span class="recent">
        {[...(found?.runs ?? [])].reverse().map(({ runId, state }) => (
          <a key={runId} href={`${"agent" in of ? "" : "/workflows"}/runs/${runId}`} aria-label={`Run ${runId?.slice(-8)}: ${word(state)}`} title={word(state)}><i class={`dot ${toneOf(state)}`} /></a>
        ))}
      </span>
    </>
  );
}

/** The latest runs of an agent or a workflow. */
export function LatestRuns({ of, name, more = [] }: { of: { agent: string } | { workflow: string }; name: (run: RunJson) => string; more?: Column<RunJson>[] }): VNode {
  const columns: Column<RunJson>[] = [
    { name: "Run", of: (run) => name(run) || `Run ${run.runId?.slice(-8)}`, under: came },
    { name: "State", size: 132, priority: 1, of: (run) => <State run={run} /> },
    { name: "Started", size: 104, priority: 1, num: true, of: ({ createTime }) => time(createTime) },
    ...more,
  ];
  return <Below<RunJson> name="Latest runs" method="agent.v1.AgentService/ListRuns" load={async () => (await pawl.agent.listRuns({ ...of, pageSize: 10 })).runs} to={({ runId }) => `${"agent" in of ? "" : "/workflows"}/runs/${runId}`} columns={columns} />;
}
