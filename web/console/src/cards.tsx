/** A call with its description, state, result and possible decisions. */

import { type BackgroundJobJson, type CallJson, type Progress, requestId, type RunJson } from "@pawl/client";
import type { ComponentChildren, VNode } from "preact";
import { useState } from "preact/hooks";

import { Approval, Fields, Value } from "./approval";
import { Chart, chartOf } from "./chart";
import { decideCall } from "./decide";
import { Icon } from "./design/icons";
import { Fault } from "./fields";
import { blank, Form, Json, type Schema } from "./form";
import { bounded, Markdown } from "./markdown";
import { argumentsOf, entriesOf, iconOf, isPlain, objectOf, read, resultLine, title, wish } from "./sentence";
import { ago, attempt, jobs, keep, kept, lasted, may, moment, pawl, titleOf, who, word } from "./state";
import { visible } from "./visible";

export { Json };

const CLASSES: Record<string, string> = {
  CALL_STATE_SUCCEEDED: "good",
  CALL_STATE_DETACHED: "good",
  CALL_STATE_FAILED: "bad",
  CALL_STATE_OUTCOME_UNKNOWN: "bad",
  CALL_STATE_AWAITING_APPROVAL: "wait",
  CALL_STATE_ASKED: "wait",
  CALL_STATE_OFFERED: "wait",
};
const WORDS: Record<string, string> = {
  CALL_STATE_AWAITING_APPROVAL: "awaiting approval",
  CALL_STATE_ASKED: "question",
  CALL_STATE_OFFERED: "waiting for a front end",
  CALL_STATE_DETACHED: "running in the background",
  CALL_STATE_OUTCOME_UNKNOWN: "outcome unknown: it may have happened",
};

export const DECIDED: Record<string, string> = {
  DECISION_KIND_APPROVE: "approved",
  DECISION_KIND_EDIT: "edited and approved",
  DECISION_KIND_REJECT: "rejected",
  DECISION_KIND_ANSWER: "answered",
};

export const CallCard = bounded(Card, ({ call }) =>
  [`${call.toolName}: ${word(call.state)}`, call.question?.question ?? call.approval?.preview, JSON.stringify(argumentsOf(call), null, 2)].filter(Boolean).join("\n\n"),
);
export const TopUp = bounded(Tokens, ({ run }) => `${run.runId} is waiting for tokens.`);

/** With `where`, the card shows the origin of the call. */
function Card({ call, progress, where, children }: { call: CallJson; progress?: Progress | undefined; where?: boolean; children?: ComponentChildren }): VNode {
  const state = call.state ?? "";
  const isApproval = state === "CALL_STATE_AWAITING_APPROVAL";
  const open = isApproval || state === "CALL_STATE_ASKED";
  const job = jobs.value[call.callId ?? ""];
  const kind = job ? jobClass(job) : (CLASSES[state] ?? "");
  const mark = { role: "group" as const, "data-item": true, tabIndex: open ? 0 : -1, "data-call": call.callId, "data-state": word(state) };
  const name = `${visible(call.toolName ?? "")}: ${word(state)}, ${[visible((call.question?.question || call.approval?.preview || "").replace(/\s+/g, " ").slice(0, 100)), objectOf(call)].filter(Boolean).join(", ")}`;
  const asked = call.askedUserId === who.value?.caller?.userId ? "" : call.askedUserId;
  const chart = call.toolName === "show_chart" ? chartOf(read(call.argumentsJson)) : "";
  if (!open)
    return (
      <div {...mark} class={`card call ${kind}`} aria-label={name}>
        {children}
        <Summary call={call} job={job} where={where} />
        {progress && !call.endTime && <Done {...progress} />}
        {job && <JobProgress job={job} />}
        {job?.notStopped && <p class="fault">{visible(job.notStopped)}</p>}
        {job?.expectedEndTime && <p class="quiet">expected to end {ago(job.expectedEndTime)}</p>}
        <Decided call={call} />
        {typeof chart !== "string" && <Chart {...chart} />}
      </div>
    );
  return (
    <div {...mark} class={`card ${kind}`} aria-label={name}>
      {children}
      {isApproval && !asked ? <Approval key={call.approval?.digest} call={call} about={<About call={call} where={where} />} /> : (
        <>
          <header class="ask">
            <Icon name={isApproval ? iconOf(call.toolName) : "help"} />
            <div>
              <h2>{wish(call)}</h2>
              <About call={call} where={where} />
            </div>
          </header>
          {asked ? <p class="quiet">Only {visible(asked)} can decide on this.</p> : <Question call={call} />}
        </>
      )}
    </div>
  );
}

function About({ call, where }: { call: CallJson; where: boolean | undefined }): VNode | null {
  if (!where) return null;
  const own = !call.userId || call.userId === who.value?.caller?.userId;
  const { conversationId = "" } = call;
  return (
    <p class="quiet">
      for {own ? "you" : visible(call.userId ?? "")}
      {conversationId && own && (
        <>
          {" · "}
          <a href={`/c/${conversationId}`}>{visible(titleOf(conversationId))}</a>
        </>
      )}
      {" · "}
      <a href={`/runs/${call.runId}`}>run</a> · <time title={moment(call.createTime)}>{ago(call.createTime)}</time>
    </p>
  );
}

function Summary({ call, job, where }: { call: CallJson; job: BackgroundJobJson | undefined; where: boolean | undefined }): VNode {
  const [shown, setShown] = useState(false);
  const { state = "", result } = call;
  const args = argumentsOf(call);
  const isBusy = !call.endTime && state !== "CALL_STATE_DETACHED";
  const status = job && job.state !== "RUN_STATE_RUNNING" ? `background job ${jobState(job)}` : state === "CALL_STATE_SUCCEEDED" ? "" : (WORDS[state] ?? word(state));
  return (
    <details onToggle={(event) => setShown(event.currentTarget.open)}>
      <summary>
        <Icon name={iconOf(call.toolName)} />
        <strong title={visible(call.toolName ?? "")}>{title(call.toolName)}</strong>
        <span class="object">{objectOf(call)}</span>
        <span class={`state ${isBusy ? "dots" : ""}`}>{status}</span>
        <span class="result">{(!status || state === "CALL_STATE_FAILED") && resultLine(call)}</span>
        {took(call) && <span class="took">{took(call)}</span>}
      </summary>
      {shown && (
        <div class="inside">
          {entriesOf(args).length > 0 ? <Fields all={entriesOf(args)} /> : typeof args === "string" && <Json value={args} />}
          {result && (
            <>
              <p class="label">Result</p>
              <Value value={read(result.contentJson)} />
              {result.note && <p class="quiet">{visible(result.note)}</p>}
            </>
          )}
          <p class="quiet">
            {call.childRunId && (
              <>
                <a href={`/runs/${call.childRunId}`}>Child run</a>
                {" · "}
                {state === "CALL_STATE_DELEGATED" && may("agent.v1.AgentService/CancelRun") && <button class="plain small bad" onClick={() => void attempt(() => pawl.agent.cancelRun({ requestId: requestId(), runId: call.childRunId ?? "" }))}>Stop it</button>}
              </>
            )}
            {where && call.agentName ? `agent ${visible(call.agentName)} · ` : ""}
            {visible(call.toolName ?? "")}, version {call.toolVersion ?? 0} · attempt {call.attempt ?? 1} · {call.callId}
          </p>
        </div>
      )}
    </details>
  );
}

export function Decided({ call: { approval, ruleId } }: { call: CallJson }): VNode | null {
  const decision = approval?.decision;
  if (!decision && !ruleId) return null;
  return (
    <p class="quiet">
      {decision && (
        <>
          {DECIDED[decision.kind ?? ""] ?? "decided"} by {visible(decision.userId ?? "")}
          {decision.reason ? `: ${visible(decision.reason)}` : ""} <time title={moment(decision.time)}>{ago(decision.time)}</time>
        </>
      )}{" "}
      {ruleId && <>by rule {ruleId}</>}
    </p>
  );
}

function Done({ fraction, message }: { fraction?: number | undefined; message: string }): VNode {
  return <p class="quiet progress">{fraction !== undefined && <progress value={fraction} max={1} aria-label="Progress" />} {visible(message)}</p>;
}

export const jobState = ({ notStopped, state }: BackgroundJobJson): string => (notStopped ? "could not be stopped" : word(state));

function jobClass({ state, notStopped }: BackgroundJobJson): string {
  if (notStopped || state === "RUN_STATE_FAILED" || state === "RUN_STATE_EXPIRED") return "bad";
  return state === "RUN_STATE_CANCELLED" || state === "RUN_STATE_CANCELLING" ? "" : "good";
}

function JobProgress({ job: { progress, state } }: { job: BackgroundJobJson }): VNode | null {
  if (!progress || state === "RUN_STATE_COMPLETED") return null;
  return <Done fraction={progress.fraction === undefined ? undefined : Number(progress.fraction)} message={progress.message ?? ""} />;
}

const mayStop = ({ endTime, state }: BackgroundJobJson): boolean => !endTime && state !== "RUN_STATE_CANCELLING" && may("agent.v1.JobService/StopJob");

function StopJob({ job: { jobId = "", definition } }: { job: BackgroundJobJson }): VNode {
  const [busy, setBusy] = useState(false);
  const stop = async (): Promise<void> => {
    setBusy(true);
    const stopped = await attempt(() => pawl.jobs.stopJob({ requestId: requestId(), jobId }));
    if (stopped?.job) jobs.value = { ...jobs.value, [stopped.job.parentCallId ?? ""]: stopped.job };
    setBusy(false);
  };
  return (
    <button type="button" class="icon" disabled={busy} aria-label={`Stop ${visible(definition?.toolName ?? "")}`} title="Stop this job" onClick={() => void stop()}>
      <Icon name="close" />
    </button>
  );
}

const PINNED_MAX = 3;

/** Open background jobs with their progress and Stop buttons, for the foot of the chat. */
export function JobStrip({ open }: { open: BackgroundJobJson[] }): VNode | null {
  if (!open.length) return null;
  return (
    <div class="jobs">
      {open.slice(0, PINNED_MAX).map((job) => (
        <div key={job.jobId} class="job">
          <span role="status">
            <Icon name="background" />
            <strong>
              <span class="unseen">In the background: </span>
              <span title={visible(job.definition?.toolName ?? "")}>{title(job.definition?.toolName)}</span>
            </strong>
            {job.state !== "RUN_STATE_RUNNING" && <span class="quiet">{job.nextTime ? `next ${ago(job.nextTime)}` : jobState(job)}</span>}
          </span>
          <JobProgress job={job} />
          {mayStop(job) && <StopJob job={job} />}
        </div>
      ))}
      <a class="quiet" href="/background">{open.length > PINNED_MAX ? `All ${open.length} jobs` : "All jobs"}</a>
    </div>
  );
}

function Question({ call }: { call: CallJson }): VNode {
  const question = call.question ?? {};
  const schema = question.answerSchemaJson ? (read(question.answerSchemaJson) as Schema) : undefined;
  const names = Object.keys(schema?.properties ?? {});
  const [answer, setAnswer] = useState(() => kept(call.callId ?? ""));
  const [filled, setFilled] = useState<Record<string, unknown> | undefined>(() => blank(schema));
  const [busy, setBusy] = useState(false);
  const [fault, setFault] = useState("");
  const say = async (answer: string): Promise<void> => {
    if (!answer.trim()) return;
    setBusy(true);
    setFault("");
    if (await decideCall(call, { kind: "DECISION_KIND_ANSWER", answer }, setFault)) keep(call.callId ?? "", "");
    setBusy(false);
  };
  // A single value is the answer itself, several are an object, and a schema without properties is yes or no.
  const only = filled?.[names[0] ?? ""];
  const whole = names.length > 1 ? JSON.stringify(filled) : typeof only === "string" ? only : (JSON.stringify(only) ?? "");
  const options = question.options?.length || !schema || names.length ? (question.options ?? []) : ["yes", "no"];
  return (
    <div class="decision">
      {!isPlain(question.question ?? "") && <Markdown text={question.question ?? ""} />}
      {question.why && <p class="quiet">{visible(question.why)}</p>}
      <p class="buttons">{options.map((option) => <button key={option} class="second" disabled={busy} onClick={() => void say(option)}>{visible(option)}</button>)}</p>
      <form class={names.length ? "" : "row"} onSubmit={(event) => (event.preventDefault(), void say(names.length ? whole : answer))}>
        {names.length ? <Form schema={schema} value={filled ?? {}} onValue={setFilled} fault={fault} name="Answer" /> : (
          <input
            aria-label="Your answer"
            placeholder={question.defaultAnswer ? `default: ${visible(question.defaultAnswer)}` : "Your answer"}
            value={answer}
            onInput={({ currentTarget: { value } }) => (setAnswer(value), keep(call.callId ?? "", value))}
          />
        )}
        <button disabled={busy || !filled}>Answer</button>
      </form>
      {!names.length && <Fault text={fault} />}
    </div>
  );
}

function Tokens({ run, children }: { run: RunJson; children?: ComponentChildren }): VNode {
  const [tokens, setTokens] = useState(Math.max(10_000, 2 * Number(run.tokensNeeded ?? 0)));
  return (
    <form
      class="card wait"
      data-item
      tabIndex={0}
      aria-label={`Run waiting for tokens: ${run.runId?.slice(-8)}`}
      onSubmit={(event) => (event.preventDefault(), void attempt(() => pawl.agent.topUpRun({ requestId: requestId(), runId: run.runId ?? "", tokens: String(tokens) })))}
    >
      <p>{children ?? "This run"} has used up its token budget. It needs {run.tokensNeeded ? `${run.tokensNeeded} more tokens` : "more tokens"}.</p>
      {may("agent.v1.AgentService/TopUpRun") && (!run.userId || run.userId === who.value?.caller?.userId) && (
        <p class="buttons">
          <input type="number" min={1} required aria-label="Tokens" value={tokens} onInput={(event) => setTokens(event.currentTarget.valueAsNumber)} />
          <button data-key="a">Add {tokens || "no"} tokens</button>
        </p>
      )}
    </form>
  );
}

function took({ startTime, endTime }: CallJson): string {
  const seconds = (Date.parse(endTime ?? "") - Date.parse(startTime ?? "")) / 1000;
  return seconds >= 0 ? lasted(seconds) : "";
}
