/** The pages of goals: their list, the form that starts one, and a goal with its attempts. */

import { type GoalAttemptJson, type GoalStatusJson, isEnded, requestId, type RunJson } from "@pawl/client";
import type { VNode } from "preact";

import { inPairs } from "./about";
import { CallCard } from "./cards";
import { Chart } from "./chart";
import { Fact } from "./design/parts";
import { agentOptions, toolOptions } from "./editing/options";
import type { FieldSpec, Values } from "./fields";
import { cut, runLink, time } from "./format";
import { unpack } from "./json";
import { paged, type Resource } from "./resource";
import { State, tokens, Why } from "./runs";
import { ago, forPeople, go, lasted, pawl } from "./state";
import { visible } from "./visible";

const percent = (fraction: number | "NaN" | "Infinity" | "-Infinity" | undefined): number => Math.round(100 * Number(fraction));
const used = (run: RunJson): string => (run.tokenBudget ? `${tokens(run) || 0} of ${Number(run.tokenBudget).toLocaleString()}` : tokens(run));
const idOf = ({ run }: GoalStatusJson): string => run?.runId ?? "";

/** A check's message, with its JSON as words. */
const inWords = (message = ""): string => visible(message.replace(/^The check returned ({.*})\.$/, (_, json: string) => `The check found ${inPairs(json)}.`));

/** The result of the last check, and when the next attempt starts. */
const howFar = ({ jobProgress, waiting }: RunJson): string => [inWords(jobProgress?.message), waiting?.reason === "WAIT_REASON_TIME" && waiting.deadlineTime && `Next attempt ${ago(waiting.deadlineTime)}.`].filter(Boolean).join(" ");

const isJudged = ({ criterion }: Values): boolean => !!criterion?.judge;
const isMeasured = ({ criterion }: Values): boolean => !!criterion && "toolName" in criterion;
const RAISE: FieldSpec[] = [
  { at: "attempts", label: "Attempts to add", kind: "number", half: true },
  { at: "tokens", label: "Tokens to add", kind: "number", half: true },
  { at: "deadlineTime", label: "New deadline", kind: "moment", half: true },
];
const FIELDS: FieldSpec[] = [
  { at: "aim", label: "Aim *", kind: "area", placeholder: "All links on the website work", hint: "The result that the agent must reach." },
  {
    at: "criterion", label: "Who decides that it is met?", kind: "choice",
    blanks: { judge: { judge: { rubric: "" } }, toolName: { toolName: "", expression: "", argumentsJson: undefined } },
    options: [["judge", "A judge: a model reads each attempt and applies your rubric"], ["toolName", "A tool: it measures the result after each attempt"]],
  },
  { at: "criterion.judge.rubric", label: "Rubric *", kind: "area", placeholder: "No page has a broken link. Redirects are allowed.", keeps: true, when: isJudged },
  { at: "criterion.toolName", label: "Tool that checks it *", kind: "select", half: true, load: async () => [["", "Choose a tool"], ...(await toolOptions())], keeps: true, when: isMeasured },
  { at: "criterion.expression", label: "Expression *", half: true, keeps: true, placeholder: "size(value.broken) == 0", hint: "Over the tool's result: true or false, or a fraction from 0 to 1.", when: isMeasured },
  { at: "criterion.argumentsJson", label: "Arguments of this tool", kind: "json", when: isMeasured },
  { at: "attemptsBy.agent", label: "Agent that makes the attempts", kind: "select", half: true, load: agentOptions },
  { at: "attemptsMax", label: "Maximum number of attempts", kind: "number", half: true },
  { at: "waitSeconds", label: "Seconds to wait between attempts", kind: "number", more: true, half: true, placeholder: "0" },
  { at: "deadlineTime", label: "Deadline", kind: "moment", more: true, half: true },
  { at: "totalTokensMax", label: "Token budget", kind: "number", more: true, half: true, placeholder: "unlimited" },
  { at: "attemptsBy.toolNames", label: "Tools of the attempts", kind: "lines", more: true, half: true, hint: "All of the agent's tools if empty." },
];

async function start({ totalTokensMax = 0, ...goal }: Values): Promise<void> {
  const answer = await pawl.goals.startGoal({ requestId: requestId(), goal, totalTokensMax: String(totalTokensMax) });
  go(`/goals/${answer.goal?.run?.runId}`);
}

export const goals: Resource<GoalStatusJson> = {
  path: "goals",
  lead: "A goal lets an agent try again until a tool or a judge finds the aim met.",
  empty: "No open goals. Start one to let an agent try until a tool or a judge finds the aim met.",
  live: true,
  list: paged("goals", (page, filters) => pawl.goals.listGoals({ ...page, openOnly: !filters["all"] })),
  filters: [{ name: "all", label: "Include ended", on: true }],
  id: idOf, title: ({ run }) => (run?.goal?.aim ?? "").slice(0, 300),
  get: async (runId) => (await pawl.goals.getGoal({ runId })).goal,
  watch: (runId, again) => pawl.watchRun(runId, again),
  columns: [
    { name: "Aim", icon: () => "goals", of: ({ run }) => cut(run?.goal?.aim), under: ({ run = {} }) => (run.failure ? <span class="fault">{cut(run.failure.message)}</span> : howFar(run)) },
    { name: "State", size: 150, priority: 1, of: ({ run = {} }) => <State run={run} /> },
    { name: "Progress", size: 150, priority: 1, listed: true, of: ({ run: { jobProgress: { fraction } = {} } = {} }) => fraction !== undefined && <span class="progress"><progress value={Number(fraction)} max={1} aria-label="Progress" /> <small>{percent(fraction)}%</small></span> },
    { name: "Attempts", size: 88, priority: 1, of: ({ run }) => `${run?.round ?? 0} of ${run?.goal?.attemptsMax}` },
    { name: "Tokens", size: 84, priority: 3, num: true, of: ({ run = {} }) => used(run) },
    { name: "Started", size: 96, priority: 3, of: ({ run }) => time(run?.createTime) },
    { name: "Ended", detailed: true, of: ({ run }) => time(run?.endTime) },
  ],
  actions: [
    {
      name: "Stop", method: "agent.v1.AgentService/CancelRun",
      inRows: true,
      when: ({ run = {} }) => !isEnded(run) && run.state !== "RUN_STATE_CANCELLING", bad: true,
      run: (goal) => pawl.agent.cancelRun({ requestId: requestId(), runId: idOf(goal) }),
    },
  ],
  make: { name: "Start a goal", submit: "Start", method: "agent.v1.GoalService/StartGoal", value: () => ({ aim: "", criterion: { judge: { rubric: "" } }, attemptsMax: 10 }), save: start, fields: FIELDS },
  edit: {
    name: "Raise limits", submit: "Raise", method: "agent.v1.GoalService/RaiseGoal", when: ({ run = {} }) => !isEnded(run), value: () => ({}), fields: RAISE,
    save: ({ tokens = 0, ...raised }, goal) => pawl.goals.raiseGoal({ requestId: requestId(), runId: idOf(goal), ...raised, tokens: String(tokens) }),
  },
  below: (goal) => <Goal key={idOf(goal)} goal={goal} />,
};

function Goal({ goal: { run = {}, attempts = [] } }: { goal: GoalStatusJson }): VNode {
  const { goal = {}, outputText } = run;
  const { toolName, argumentsJson, expression, judge } = goal.criterion ?? {};
  const runs = new Set([run.runId, ...attempts.map(({ runId }) => runId)]);
  const measured = attempts.filter(({ progress }) => progress !== undefined);
  return (
    <>
      <Why run={run} />
      {forPeople.value.filter(({ runId }) => runs.has(runId)).map((call) => <CallCard key={call.callId} call={call} />)}
      <h2>Criterion</h2>
      <dl class="facts inline">
        <Fact name="Run" value={runLink(run.runId)} />
        <Fact name="Deadline" value={time(goal.deadlineTime)} />
        <Fact name="Tool" value={visible(toolName ?? "")} />
        <Fact name="Arguments" value={argumentsJson && visible(inPairs(JSON.stringify(unpack({ argumentsJson }).argumentsJson)))} />
        <Fact name="Expression" value={visible(expression ?? "")} />
        <Fact name="Judge" value={judge && (judge.agent || "the agent of the attempts")} />
        <Fact name="Rubric" value={visible(judge?.rubric ?? "")} />
        <Fact name="Agent of the attempts" value={goal.attemptsBy?.agent} />
        <Fact name="Tools of the attempts" value={visible((goal.attemptsBy?.toolNames ?? []).join(", "))} />
        <Fact name="Wait between attempts" value={!!goal.waitSeconds && lasted(Number(goal.waitSeconds))} />
      </dl>
      {outputText && (
        <>
          <h2>Report</h2>
          <p class="panel prose preview">{visible(outputText)}</p>
        </>
      )}
      {!!measured.length && (
        <Chart title="Progress in %" labels={measured.map(({ number }) => `Attempt ${number}`)} values={measured.map(({ progress }) => percent(progress))} most={100} />
      )}
      {attempts.map((attempt) => <Attempt key={attempt.number} attempt={attempt} />).reverse()}
    </>
  );
}

function Attempt({ attempt: { number, runId = "", startTime, endTime, met, progress, answer, reason, citedCallIds = [] } }: { attempt: GoalAttemptJson }): VNode {
  return (
    <article class={`card ${met ? "good" : endTime ? "" : "wait"}`} aria-label={`Attempt ${number}`} data-item tabIndex={-1}>
      <header class="row">
        <strong>Attempt {number}</strong>
        <span class="state">{!endTime ? "running" : met ? "met" : progress === undefined ? "fell short" : `fell short at ${percent(progress)}%`}</span>
        <span class="quiet">{time(startTime)}</span>
        {runId && <a href={`/runs/${runId}`}>Open its run</a>}
      </header>
      {answer && <p>Tried: {visible(answer)}</p>}
      {reason && <p>{met ? "Met" : "Fell short"}: {inWords(reason)}</p>}
      {!!citedCallIds.length && <p class="quiet">The judge cites {citedCallIds.map(visible).join(", ")}.</p>}
    </article>
  );
}
