/** A call: its arguments, its state and the possible decisions. */

import {
  type BackgroundJobJson,
  type CallDecisionJson,
  type CallJson,
  type DecisionKindJson,
  decode,
  encode,
  type Progress,
  requestId,
  type RunJson,
  type SeriesJson,
} from "@pawl/client";
import type { ComponentChildren, VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { Chart, chartOf } from "./chart";
import { blank, Fault, Form, type Schema } from "./form";
import { parse } from "./json";
import { bounded, Markdown } from "./markdown";
import { ago, attempt, jobs, keep, kept, lasted, may, moment, notice, pawl, who, word } from "./state";
import { visible } from "./visible";

const DECISIONS_MAX = 64;
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

const DECIDED: Record<string, string> = {
  DECISION_KIND_APPROVE: "approved",
  DECISION_KIND_EDIT: "edited and approved",
  DECISION_KIND_REJECT: "rejected",
  DECISION_KIND_ANSWER: "answered",
};

export const CallCard = bounded(Card, ({ call }) =>
  [`${call.toolName}: ${word(call.state)}`, call.question?.question ?? call.approval?.preview, JSON.stringify(shownArguments(call), null, 2)].filter(Boolean).join("\n\n"),
);
export const TopUp = bounded(Tokens, ({ run }) => `${run.runId} is waiting for tokens.`);

function Card({ call, progress, where, children }: { call: CallJson; progress?: Progress | undefined; where?: boolean; children?: ComponentChildren }): VNode {
  const state = call.state ?? "";
  const open = state === "CALL_STATE_AWAITING_APPROVAL" || state === "CALL_STATE_ASKED";
  const decision = call.approval?.decision;
  const asked = call.askedUserId === who.value?.caller?.userId ? "" : call.askedUserId;
  const job = jobs.value[call.callId ?? ""];
  return (
    <div
      role="group"
      class={`card ${job ? jobClass(job) : (CLASSES[state] ?? "")}`}
      data-item
      tabIndex={open ? 0 : -1}
      data-call={call.callId}
      data-state={word(state)}
      aria-label={`${visible(call.toolName ?? "")}: ${word(state)}, ${subject(call)}`}
    >
      {children}
      <header>
        <strong>{visible(call.toolName ?? "")}</strong>
        <span class="state">{job && job.state !== "RUN_STATE_RUNNING" ? `background job ${jobState(job)}` : (WORDS[state] ?? word(state))}</span>
        {call.startTime && call.endTime && <span class="quiet">{took(call)}</span>}
        {where && (
          <a href={`/runs/${call.runId}`} class="quiet">
            {ago(call.createTime)}, in a run{call.agentName ? ` of ${visible(call.agentName)}` : ""}
          </a>
        )}
      </header>
      {progress && !call.endTime && <Done {...progress} />}
      {job && <Background job={job} />}
      {open && asked && <p class="quiet">Only {visible(asked)} can decide on this.</p>}
      {state === "CALL_STATE_AWAITING_APPROVAL" && !asked && <Approval key={call.approval?.digest} call={call} />}
      {state === "CALL_STATE_ASKED" && !asked && <Question call={call} />}
      {decision && (
        <p class="quiet">
          {DECIDED[decision.kind ?? ""] ?? "decided"} by {visible(decision.userId ?? "")}
          {decision.reason ? `: ${visible(decision.reason)}` : ""} <time title={moment(decision.time)}>{ago(decision.time)}</time>
        </p>
      )}
      {call.ruleId && <p class="quiet">by rule {call.ruleId}</p>}
      {call.toolName === "show_chart" && !open && <Drawn args={value(call.argumentsJson)} />}
      {!open && <Details call={call} />}
    </div>
  );
}

function Done({ fraction, message }: { fraction?: number | undefined; message: string }): VNode {
  return (
    <p class="quiet">
      {fraction !== undefined && <progress value={fraction} max={1} aria-label="Progress" />} {visible(message)}
    </p>
  );
}

/** Returns the state of a job in words, and whether a stop has failed. */
export function jobState(job: BackgroundJobJson): string {
  if (job.notStopped) return "could not be stopped";
  return word(job.state);
}

function jobClass({ state, notStopped }: BackgroundJobJson): string {
  if (notStopped || state === "RUN_STATE_FAILED" || state === "RUN_STATE_EXPIRED") return "bad";
  return state === "RUN_STATE_CANCELLED" || state === "RUN_STATE_CANCELLING" ? "" : "good";
}

/** The progress of a background job, when it is expected to end, and the button that stops it. */
function Background({ job }: { job: BackgroundJobJson }): VNode {
  const { expectedEndTime, notStopped } = job;
  return (
    <>
      <JobProgress job={job} />
      {expectedEndTime && <p class="quiet">expected to end {ago(expectedEndTime)}</p>}
      {notStopped && <p class="fault">{visible(notStopped)}</p>}
      {mayStop(job) && (
        <p class="buttons">
          <StopJob job={job} />
        </p>
      )}
    </>
  );
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
    <button type="button" class="second bad" disabled={busy} aria-label={`Stop ${visible(definition?.toolName ?? "")}`} onClick={() => void stop()}>
      Stop
    </button>
  );
}

const STRIP_JOBS_MAX = 3;

/** Open background jobs with their progress and Stop buttons, for the foot of the chat. */
export function JobStrip({ open }: { open: BackgroundJobJson[] }): VNode | null {
  if (!open.length) return null;
  return (
    <div class="strip">
      {open.slice(0, STRIP_JOBS_MAX).map((job) => (
        <div key={job.jobId} class="job">
          <span role="status">
            In the background: {visible(job.definition?.toolName ?? "")}
            {job.state !== "RUN_STATE_RUNNING" && `, ${jobState(job)}`}
          </span>
          <JobProgress job={job} />
          {mayStop(job) && <StopJob job={job} />}
        </div>
      ))}
      <a href="/background">{open.length > STRIP_JOBS_MAX ? `Manage all ${open.length}` : "Manage"}</a>
    </div>
  );
}

function Drawn({ args }: { args: unknown }): VNode | null {
  const chart = chartOf(args);
  return typeof chart === "string" ? null : <Chart {...chart} />;
}

function Details({ call }: { call: CallJson }): VNode {
  const result = call.result;
  const [shown, setShown] = useState(false);
  return (
    <details onToggle={(event) => setShown(event.currentTarget.open)}>
      <summary>{summary(call)}</summary>
      {shown && (
        <>
          <h4>Arguments</h4>
          <Json value={shownArguments(call)} />
          {result && (
            <>
              <h4>Result</h4>
              <Json value={value(result.contentJson, parse)} />
              {result.note && <p class="quiet">{visible(result.note)}</p>}
            </>
          )}
          {call.childRunId && (
            <p>
              <a href={`/runs/${call.childRunId}`}>Child run</a>
            </p>
          )}
          <p class="quiet">
            {call.callId} · attempt {call.attempt ?? 1} · version {call.toolVersion ?? 0}
          </p>
        </>
      )}
    </details>
  );
}

function Approval({ call }: { call: CallJson }): VNode {
  const first = (value(call.argumentsJson, parse) ?? {}) as Record<string, unknown>;
  const [args, setArgs] = useState<Record<string, unknown> | undefined>(first);
  const [editing, setEditing] = useState(false);
  const [schema, setSchema] = useState<Schema>();
  const [reason, setReason] = useState("");
  const [busy, setBusy] = useState(false);
  const [scope, setScope] = useState<Scope | "">("");
  const [series, setSeries] = useState(false);
  const [limits, setLimits] = useState<SeriesJson>({});
  const [answer, setAnswer] = useState<string>();
  const [fault, setFault] = useState("");
  const approval = call.approval ?? {};
  const offered = approval.series;
  useEffect(() => {
    if (!editing || schema) return;
    pawl.tools
      .getTool({ name: call.toolName ?? "", version: call.toolVersion ?? 0 })
      .then(({ tool }) => setSchema((value(tool?.definition?.argumentsSchemaJson) as Schema) ?? {}))
      .catch(() => setSchema({}));
  }, [editing]);
  const decide = async (kind: DecisionKindJson): Promise<void> => {
    setBusy(true);
    setFault("");
    const digest = approval.digest ?? "";
    const submit = (decision: Decision): Promise<boolean> => decideCall(call, decision, setFault);
    if (kind === "DECISION_KIND_REJECT") await submit({ kind, digest, reason });
    else if (kind === "DECISION_KIND_ANSWER") await submit({ kind, digest, answer: answer ?? "" });
    else {
      const granted = series && offered ? { forSeries: true, digest: offered.digest ?? "" } : { digest };
      const bounded = series && offered && fewer(offered, limits) ? { editedSeries: { ...offered, ...limits } } : {};
      const edits = kind === "DECISION_KIND_EDIT" || "editedSeries" in bounded;
      const edited = edits ? { kind: "DECISION_KIND_EDIT" as const, argumentsJson: encode(args) } : { kind };
      await approveWithRule(call, scope, () => submit({ ...edited, reason, ...granted, ...bounded }));
    }
    setBusy(false);
  };
  const changed = JSON.stringify(args) !== JSON.stringify(first);
  if (!may("agent.v1.AgentService/DecideCalls")) return <p>{visible(approval.preview ?? "")}</p>;
  return (
    <div class="decision">
      {approval.preview && !changed && <pre class="preview">{visible(approval.preview)}</pre>}
      {(approval.approvalsRequired ?? 1) > 1 && (
        <p class="quiet">
          {approval.approvals?.length ?? 0} of {approval.approvalsRequired} people have approved
          {(approval.approvals ?? []).map((each) => `, ${each.userId}`).join("")}.
        </p>
      )}
      {editing ? (
        schema && <Form schema={schema} value={args ?? first} onValue={setArgs} fault={fault} />
      ) : (
        <Json value={first} />
      )}
      {!editing && <Fault text={fault} />}
      {changed && args && <Diff before={first} after={args} />}
      <label class="row">
        <span class="quiet">Reason</span>
        <input value={reason} onInput={(event) => setReason(event.currentTarget.value)} placeholder="optional" />
      </label>
      {offered && (
        <label class="row">
          <input type="checkbox" checked={series} onChange={(event) => setSeries(event.currentTarget.checked)} /> Approve the whole series:
          {offered.iterationsMax ? ` ${offered.iterationsMax} times` : ""} every {offered.intervalSeconds ?? 0} s
        </label>
      )}
      {offered && series && (
        <label class="row">
          <span class="quiet">Maximum calls</span>
          <input
            type="number"
            min={1}
            max={offered.iterationsMax}
            value={limits.iterationsMax ?? offered.iterationsMax ?? ""}
            onInput={(event) => setLimits({ iterationsMax: event.currentTarget.valueAsNumber || (offered.iterationsMax ?? 1) })}
          />
        </label>
      )}
      {canRemember(call) && !series && (
        <label class="row">
          <span class="quiet">Remember as a rule</span>
          <select value={scope} onChange={(event) => setScope(event.currentTarget.value as Scope | "")}>
            <option value="">No, only this call</option>
            <option value="RULE_SCOPE_RUN">For this run</option>
            <option value="RULE_SCOPE_CONVERSATION">For this conversation</option>
            <option value="RULE_SCOPE_USER">For all my runs</option>
          </select>
        </label>
      )}
      <p class="buttons">
        <button
          disabled={busy || !args}
          data-key="a"
          onClick={() => void decide(changed ? "DECISION_KIND_EDIT" : "DECISION_KIND_APPROVE")}
        >
          {changed ? "Approve with edits" : "Approve"}
        </button>
        <button class="second" disabled={busy} data-key="e" onClick={() => (setArgs(first), setEditing(!editing))}>
          {editing ? "Discard edits" : "Edit"}
        </button>
        <button class="second bad" disabled={busy} data-key="r" onClick={() => void decide("DECISION_KIND_REJECT")}>
          Reject
        </button>
        <button class="second" disabled={busy} aria-expanded={answer !== undefined} onClick={() => setAnswer(answer === undefined ? "" : undefined)}>
          Answer instead
        </button>
        <span class="quiet">{call.deadlineTime && `expires ${ago(call.deadlineTime)}; then it is escalated, or the call does not run`}</span>
      </p>
      {answer !== undefined && (
        <form
          class="row"
          onSubmit={(event) => {
            event.preventDefault();
            void decide("DECISION_KIND_ANSWER");
          }}
        >
          <input aria-label="Result to return instead of running the call" placeholder="Result to return instead of running the call" required value={answer} onInput={(event) => setAnswer(event.currentTarget.value)} />
          <button disabled={busy}>Answer</button>
        </form>
      )}
      <p class="quiet digest" title={changed ? "" : "The decision applies to exactly this version"}>
        {visible(approval.cause ?? "")} {!changed && `· ${(approval.digest ?? "").slice(0, 16)}`}
      </p>
    </div>
  );
}

function fewer(offered: SeriesJson, chosen: SeriesJson): boolean {
  return chosen.iterationsMax !== undefined && chosen.iterationsMax !== offered.iterationsMax;
}

type Scope = "RULE_SCOPE_RUN" | "RULE_SCOPE_CONVERSATION" | "RULE_SCOPE_USER";

/** Rules apply to your own runs, and not to calls that need several approvers. */
function canRemember({ userId, approval }: CallJson): boolean {
  const own = !userId || userId === who.value?.caller?.userId;
  return own && (approval?.approvalsRequired ?? 1) <= 1 && may("tool.v1.RuleService/CreateRule");
}

/** Creates a rule that allows the tool, then approves the call; if that fails, revokes the rule. */
async function approveWithRule({ toolName = "", callId = "", runId = "", conversationId = "" }: CallJson, scope: Scope | "", approve: () => Promise<boolean>): Promise<void> {
  if (!scope) return void (await approve());
  const scopeId = { RULE_SCOPE_RUN: runId, RULE_SCOPE_CONVERSATION: conversationId, RULE_SCOPE_USER: "" }[scope];
  const rule = { effect: "RULE_EFFECT_ALLOW" as const, scope, scopeId, toolName, callId };
  const made = await attempt(() => pawl.rules.createRule({ requestId: requestId(), rule }));
  if (!made || (await approve())) return;
  const error = notice.value;
  await attempt(() => pawl.rules.revokeRule({ ruleId: made.rule?.ruleId ?? "" }));
  notice.value ||= error;
}

function Question({ call }: { call: CallJson }): VNode {
  const question = call.question ?? {};
  const schema = question.answerSchemaJson ? (value(question.answerSchemaJson) as Schema) : undefined;
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
      <Markdown text={question.question ?? ""} />
      {question.why && <p class="quiet">{visible(question.why)}</p>}
      <p class="buttons">
        {options.map((option) => (
          <button key={option} class="second" disabled={busy} onClick={() => void say(option)}>
            {visible(option)}
          </button>
        ))}
      </p>
      <form
        class={names.length ? "" : "row"}
        onSubmit={(event) => {
          event.preventDefault();
          void say(names.length ? whole : answer);
        }}
      >
        {names.length ? (
          <Form schema={schema} value={filled ?? {}} onValue={setFilled} fault={fault} name="Answer" />
        ) : (
          <input
            aria-label="Your answer"
            placeholder={question.defaultAnswer ? `default: ${visible(question.defaultAnswer)}` : "Your answer"}
            value={answer}
            onInput={(event) => {
              setAnswer(event.currentTarget.value);
              keep(call.callId ?? "", event.currentTarget.value);
            }}
          />
        )}
        <button disabled={busy || !filled}>Answer</button>
      </form>
      {!names.length && <Fault text={fault} />}
    </div>
  );
}

/** Adds tokens to a run that has used up its budget. */
function Tokens({ run, children }: { run: RunJson; children?: ComponentChildren }): VNode {
  const [tokens, setTokens] = useState(Math.max(10_000, 2 * Number(run.tokensNeeded ?? 0)));
  return (
    <form
      class="card wait"
      data-item
      tabIndex={0}
      aria-label={`Run waiting for tokens: ${run.runId?.slice(-8)}`}
      onSubmit={(event) => {
        event.preventDefault();
        void attempt(() => pawl.agent.topUpRun({ requestId: requestId(), runId: run.runId ?? "", tokens: String(tokens) }));
      }}
    >
      <p>
        {children ?? "This run"} has used up its token budget. It needs {run.tokensNeeded ? `${run.tokensNeeded} more tokens` : "more tokens"}.
      </p>
      {may("agent.v1.AgentService/TopUpRun") && (!run.userId || run.userId === who.value?.caller?.userId) && (
        <p class="buttons">
          <input type="number" min={1} required aria-label="Tokens" value={tokens} onInput={(event) => setTokens(event.currentTarget.valueAsNumber)} />
          <button data-key="a">Add {tokens || "no"} tokens</button>
        </p>
      )}
    </form>
  );
}

type Decision = Omit<CallDecisionJson, "runId" | "callId">;

/**
 * Decides about a call; true if the decision was accepted. Correctable faults go to `onFault`. If another tab or user decided
 * first, a notice says so, because the card disappears.
 */
function decideCall(call: CallJson, decision: Decision, onFault: (message: string) => void): Promise<boolean> {
  return decideAll([call], () => decision, onFault);
}

/** Decides about several calls, at most 64 per request; true if all decisions were accepted. */
export async function decideAll(calls: CallJson[], decision: (call: CallJson) => Decision, onFault?: (message: string) => void): Promise<boolean> {
  const done = await attempt(async () => {
    const refused = [];
    for (let start = 0; start < calls.length; start += DECISIONS_MAX) {
      const decisions = calls.slice(start, start + DECISIONS_MAX).map((call) => ({ runId: call.runId ?? "", callId: call.callId ?? "", ...decision(call) }));
      const { receipts = [] } = await pawl.agent.decideCalls({ requestId: requestId(), decisions });
      refused.push(...receipts.filter(({ status }) => status !== "RECEIPT_STATUS_ACCEPTED" && status !== "RECEIPT_STATUS_DUPLICATE"));
    }
    const [first] = refused;
    if (!first) return true;
    if (onFault && first.status === "RECEIPT_STATUS_REFUSED" && CORRECTABLE.has(first.reason ?? "")) return void onFault(first.message ?? "");
    throw new Error(`${calls.length > 1 ? `${refused.length} of ${calls.length} decisions were not accepted. ` : ""}${first.message || "This call has already been decided."}`);
  });
  return done ?? false;
}

const CORRECTABLE = new Set(["INVALID_ARGUMENTS", "INVALID_FIELD", "INVALID_JSON", "TOO_LARGE"]);

function Diff({ before, after }: { before: Record<string, unknown>; after: Record<string, unknown> }): VNode {
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])];
  return (
    <table class="diff" aria-label="Changes">
      <tbody>
        {names
          .filter((name) => JSON.stringify(before[name]) !== JSON.stringify(after[name]))
          .map((name) => (
            <tr key={name}>
              <th scope="row">{visible(name)}</th>
              <td>
                <del>{visible(JSON.stringify(before[name]) ?? "–")}</del>
              </td>
              <td>
                <ins>{visible(JSON.stringify(after[name]) ?? "–")}</ins>
              </td>
            </tr>
          ))}
      </tbody>
    </table>
  );
}

export function Json({ value }: { value: unknown }): VNode {
  const text = typeof value === "string" ? value : (JSON.stringify(value, null, 2) ?? "");
  return (
    <pre class="json" tabIndex={0}>
      {visible(text.length > 20_000 ? `${text.slice(0, 20_000)}\n... (${text.length} characters)` : text)}
    </pre>
  );
}

function value(bytes: string | undefined, read?: (text: string) => unknown): unknown {
  try {
    return decode(bytes, read);
  } catch {
    return "(not JSON)";
  }
}

/** The arguments of a call; invalid ones as the model wrote them. */
function shownArguments({ argumentsJson, proposedArguments }: CallJson): unknown {
  return argumentsJson ? value(argumentsJson, parse) : proposedArguments;
}

function summary(call: CallJson): string {
  const all = shownArguments(call);
  return short(typeof all === "string" ? all : (JSON.stringify(all) ?? "")) || "no arguments";
}

/** Distinguishes a call from others of the same tool, for screen readers. */
function subject(call: CallJson): string {
  return short((call.question?.question || call.approval?.preview || "").replace(/\s+/g, " ")) || summary(call);
}

function short(text: string): string {
  return visible(text.length > 100 ? `${text.slice(0, 100)} ...` : text);
}

function took(call: CallJson): string {
  const seconds = (Date.parse(call.endTime ?? "") - Date.parse(call.startTime ?? "")) / 1000;
  return seconds >= 0 ? lasted(seconds) : "";
}
