/** The list of runs, and the parts of a run that other pages show. */

import { isEnded, requestId, type RunJson, type RunStateJson } from "@pawl/client";
import type { ComponentChildren, VNode } from "preact";

import { aboutOf, inPairs, messageOf } from "./about";
import type { IconName } from "./design/icons";
import { Badge, toneOf } from "./design/parts";
import type { Column } from "./design/table";
import { agentOptions, workflowOptions } from "./editing/options";
import { cut, plain, time, tokenCount } from "./format";
import { Below, paged, type Resource, useRead } from "./resource";
import { ago, clock, go, lasted, moment, pawl, STATES, word } from "./state";
import { visible } from "./visible";

const seconds = ({ createTime = "", endTime }: RunJson): number => Math.max(0, (endTime ? Date.parse(endTime) : clock.value) - Date.parse(createTime)) / 1000;
export const duration = (run: RunJson): string => lasted(seconds(run));

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
  list: paged("runs", async (page, { state = "", agent = "", workflow = "", parent = "", conversation = "" }) => {
    const states = TABS.find(([name]) => name === state)?.[2] ?? (Object.keys(STATES).filter((each) => STATES[each] === state) as RunStateJson[]);
    const found = await pawl.agent.listRuns({ ...page, pageSize: 50, states, agent, workflow, parentRunId: parent, conversationId: conversation });
    return conversation ? found : { ...found, runs: folded(found.runs ?? []) };
  }),
  tabs: { name: "state", all: TABS.map(([name, label]) => [name, label] as const), counts },
  filters: [
    { name: "agent", label: "Agent", load: async () => [["default", ""], ...(await agentOptions())] },
    { name: "workflow", label: "Workflow", load: workflowOptions },
    { name: "parent", label: "Parent run", linked: true },
    { name: "conversation", label: "Conversation", linked: true },
  ],
  id: ({ runId }) => runId ?? "",
  columns: [
    { name: "Run", icon: iconOf, of: (run) => nameOfRun(run), under: came },
    { name: "State", size: 172, priority: 1, by: (run) => word(run.state), of: (run) => <State run={run} /> },
    { name: "Agent", size: 124, priority: 2, by: kindOf, of: (run) => (run.workflow || run.job ? <span class="quiet">{run.workflow ? "Workflow" : "Job"}</span> : kindOf(run)) },
    { name: "Started", size: 104, priority: 1, by: ({ createTime = "" }) => createTime, of: ({ createTime }) => time(createTime) },
    { name: "Duration", size: 92, priority: 3, num: true, by: seconds, of: duration },
    { name: "Tokens", size: 80, priority: 3, num: true, by: (run) => tokenCount(run.usage), of: tokens },
  ],
  actions: [
    { name: "Retry", method: "agent.v1.AgentService/StartRun", inRows: true, when: mayRetry, run: retry },
    { name: "Decide", method: "agent.v1.OperatorService/ListAttention", inRows: true, main: true, when: ({ state }) => state === "RUN_STATE_NEEDS_ATTENTION", run: async ({ runId }) => go(`/attention/${runId}`) },
    { name: "Decide", method: "agent.v1.AgentService/DecideCalls", inRows: true, when: isForPeople, run: async () => go("/inbox") },
  ],
};

const COUNTED_MAX = 100;

/** How many runs have failed or wait, at most 100 each. */
async function counts(): Promise<Record<string, string>> {
  const some = TABS.filter(([name]) => name === "waiting" || name === "failed");
  const found = await Promise.all(some.map(async ([, , states]) => (await pawl.agent.listRuns({ pageSize: COUNTED_MAX, states })).runs?.length ?? 0));
  return Object.fromEntries(some.map(([name], at) => [name, found[at] === COUNTED_MAX ? `${COUNTED_MAX}+` : String(found[at] || "")]));
}

/** A run that reports the results of a job, with the earlier ones of its conversation. */
type Listed = RunJson & { reports?: number };

/** Keeps the newest report of each conversation. */
function folded(runs: RunJson[]): Listed[] {
  const isReport = ({ generation = 0, state }: RunJson): boolean => generation > 0 && state === "RUN_STATE_COMPLETED";
  return runs.flatMap((run) => {
    if (!isReport(run)) return [run];
    const same = runs.filter((each) => isReport(each) && each.conversationId === run.conversationId);
    return same[0] === run ? [{ ...run, reports: same.length }] : [];
  });
}

export const nameOfRun = (run: RunJson): string => aboutOf(run) || (run.createTime ? "…" : "");

function iconOf({ undo, goal, workflow, job, generation, parentRunId }: RunJson): IconName {
  return undo ? "again" : goal ? "goals" : workflow ? "workflows" : job || generation ? "background" : parentRunId ? "agents" : "chat";
}

function mayRetry({ runId = "", state, workflow, job, goal, undo, parentRunId }: RunJson): boolean {
  return (state === "RUN_STATE_FAILED" || state === "RUN_STATE_EXPIRED") && !job && !goal && !undo && !parentRunId && (!!workflow || !!messageOf(runId));
}

/** Starts a failed run again: its workflow with the same input, or its message in the same conversation. */
async function retry({ runId = "", conversationId = "", workflow, agent }: RunJson): Promise<void> {
  if (workflow) {
    const { run } = await pawl.workflows.startWorkflow({ requestId: requestId(), name: workflow.name ?? "", ...(workflow.inputJson ? { inputJson: workflow.inputJson } : {}) });
    return go(`/workflows/runs/${run?.runId}`);
  }
  await pawl.agent.startRun({ requestId: requestId(), conversationId, text: messageOf(runId), agent: agent?.name ?? "" });
  go(`/c/${conversationId}`);
}

export function kindOf({ workflow, job, goal, agent }: RunJson): string {
  return workflow ? `workflow ${workflow.name}` : job ? `job ${job.toolName}` : goal ? "goal" : (agent?.name ?? "default");
}

/** The outcome of a run: its failure, what it is waiting for, or its answer. */
function came({ failure, waiting, outputText = "", reports = 0, conversationId }: Listed): ComponentChildren {
  if (failure) return <span class="fault">{cut(failure.message || failure.reason)}</span>;
  const said = cut(waiting?.sentence || plain(inPairs(outputText).replace(/\{"[^{}]*\}/g, inPairs)));
  return reports > 1 ? <><a href={`/runs?conversation=${conversationId}`}>{reports} reports</a> · {said}</> : said;
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
    <div class={`why ${isForPeople(run) || state === "RUN_STATE_NEEDS_ATTENTION" ? "warn" : ""}`}>
      <strong>Why it waits</strong>
      <p>{visible(waiting.sentence)} {waiting.remedy && visible(waiting.remedy)}</p>
      <p class="quiet">
        {waiting.sinceTime && <>Since {ago(waiting.sinceTime)}. </>}
        {waiting.deadlineTime && <span title={moment(waiting.deadlineTime)}>{CONTINUES.test(waiting.reason ?? "") ? "Continues" : "Expires"} {ago(waiting.deadlineTime)}.</span>}
      </p>
    </div>
  );
}

/** Reasons to wait that are not just "waiting". People must act on the first three. */
const WAITS: Record<string, string> = { APPROVAL: "waits for approval", ANSWER: "waits for an answer", TOKENS: "needs tokens", TIME: "sleeping", PAUSED: "paused" };
const FOR_PEOPLE = 3;

const waitOf = ({ state, waiting }: RunJson): number => (state === "RUN_STATE_WAITING" ? Object.keys(WAITS).indexOf((waiting?.reason ?? "").replace("WAIT_REASON_", "")) : -1);
function isForPeople(run: RunJson): boolean {
  return waitOf(run) >= 0 && waitOf(run) < FOR_PEOPLE;
}

export function State({ run }: { run: Pick<RunJson, "state" | "waiting"> }): VNode {
  return <Badge tone={isForPeople(run) ? "warn" : toneOf(run.state)}>{Object.values(WAITS)[waitOf(run)] ?? word(run.state)}</Badge>;
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
      <span class="recent" role="img" aria-label={`Last runs, the newest first: ${(found?.runs ?? []).map(({ state }) => word(state)).join(", ")}`}>
        {[...(found?.runs ?? [])].reverse().map(({ runId, state }) => <i key={runId} title={word(state)} class={`dot ${toneOf(state)}`} />)}
      </span>
    </>
  );
}

/** The latest runs of an agent or a workflow. */
export function LatestRuns({ of, name, more = [] }: { of: { agent: string } | { workflow: string }; name: (run: RunJson) => string; more?: Column<RunJson>[] }): VNode {
  const columns: Column<RunJson>[] = [
    { name: "Run", of: (run) => name(run) || `Run ${run.runId?.slice(-8)}`, under: came },
    { name: "State", size: 180, priority: 1, of: (run) => <State run={run} /> },
    { name: "Started", size: 104, priority: 1, num: true, of: ({ createTime }) => time(createTime) },
    ...more,
  ];
  return <Below<RunJson> name="Latest runs" method="agent.v1.AgentService/ListRuns" load={async () => (await pawl.agent.listRuns({ ...of, pageSize: 10 })).runs} to={({ runId }) => `${"agent" in of ? "" : "/workflows"}/runs/${runId}`} columns={columns} />;
}
