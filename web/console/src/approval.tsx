/** A request to approve a call, with its effect and the fields that can be edited. */

import { type CallJson, type DecisionKindJson, encode, type SeriesJson } from "@pawl/client";
import type { ComponentChildren, VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { approveWithRule, canRemember, type Decision, decideCall, type Scope } from "./decide";
import { Icon } from "./design/icons";
import { Fault } from "./fields";
import { Form, Json, type Schema } from "./form";
import { entriesOf, iconOf, inWords, isOfNode, read, wish } from "./sentence";
import { ago, may, moment, pawl } from "./state";
import { visible } from "./visible";

/** A cause in words: "category SENSITIVE, bulk of 5" is "Sensitive, bulk of 5". */
const inPlain = (cause: string): string => visible(cause).replace(/category ([A-Z])([A-Z]+)/, (_, first: string, rest: string) => first + rest.toLowerCase());
const EXPIRED_SOON_MS = 3_600_000;

export function Approval({ call, about }: { call: CallJson; about: ComponentChildren }): VNode {
  const first = (read(call.argumentsJson) ?? {}) as Record<string, unknown>;
  const [args, setArgs] = useState<Record<string, unknown> | undefined>(first);
  const [editing, setEditing] = useState(false);
  const [schema, setSchema] = useState<Schema>();
  const [reason, setReason] = useState("");
  const [busy, setBusy] = useState(false);
  const [scope, setScope] = useState<Scope | "">("");
  const [series, setSeries] = useState(false);
  const [limits, setLimits] = useState<SeriesJson>({});
  const [answer, setAnswer] = useState("");
  const [fault, setFault] = useState("");
  const approval = call.approval ?? {};
  const offered = approval.series;
  const mayDecide = may("agent.v1.AgentService/DecideCalls");
  useEffect(() => {
    if (!editing || schema) return;
    pawl.tools
      .getTool({ name: call.toolName ?? "", version: call.toolVersion ?? 0 })
      .then(({ tool }) => setSchema((read(tool?.definition?.argumentsSchemaJson) as Schema) ?? {}))
      .catch(() => setSchema({}));
  }, [editing]);
  const decide = async (kind: DecisionKindJson): Promise<void> => {
    setBusy(true);
    setFault("");
    const digest = approval.digest ?? "";
    const submit = (decision: Decision): Promise<boolean> => decideCall(call, decision, setFault);
    if (kind === "DECISION_KIND_REJECT") await submit({ kind, digest, reason });
    else if (kind === "DECISION_KIND_ANSWER") await submit({ kind, digest, answer });
    else {
      const granted = series && offered ? { forSeries: true, digest: offered.digest ?? "" } : { digest };
      const bounded = series && offered && fewer(offered, limits) ? { editedSeries: { ...offered, ...limits } } : {};
      const edits = kind === "DECISION_KIND_EDIT" || "editedSeries" in bounded;
      const edited = edits ? { kind: "DECISION_KIND_EDIT" as const, argumentsJson: encode(args) } : { kind };
      await approveWithRule(call, scope, () => submit({ ...edited, reason, ...granted, ...bounded }));
    }
    setBusy(false);
  };
  const isOpen = editing && !!schema;
  const changed = JSON.stringify(args) !== JSON.stringify(first);
  const buttons = mayDecide && (
    <div class="buttons">
      <button disabled={busy || !args} data-key="a" onClick={() => void decide(changed ? "DECISION_KIND_EDIT" : "DECISION_KIND_APPROVE")}>
        {changed || isOpen ? "Approve with edits" : "Approve"}
      </button>
      {!isOfNode(call) && <button class="second" disabled={busy} data-key="e" onClick={() => (setArgs(first), setEditing(!editing))}>{editing ? "Discard edits" : "Edit"}</button>}
      <button class="second bad" disabled={busy} data-key="r" onClick={() => void decide("DECISION_KIND_REJECT")}>Reject</button>
    </div>
  );
  return (
    <>
      <header class="ask">
        <Icon name={iconOf(call.toolName)} />
        <div>
          <h2>{wish(call)}</h2>
          {about}
        </div>
        {!isOpen && buttons}
      </header>
      {!changed && !isOpen && (approval.preview ? <pre class="preview">{visible(approval.preview)}</pre> : <Fields all={entriesOf(first)} />)}
      {isOpen && <Form schema={schema} value={args ?? first} onValue={setArgs} fault={fault} folds />}
      {!editing && <Fault text={fault} />}
      {changed && args && <Diff before={first} after={args} />}
      {isOpen && buttons}
      {offered && mayDecide && (
        <div class="row">
          <label class="row">
            <input type="checkbox" checked={series} onChange={(event) => setSeries(event.currentTarget.checked)} /> Approve the whole series:
            {offered.iterationsMax ? ` ${offered.iterationsMax} times` : ""} every {offered.intervalSeconds ?? 0} s
          </label>
          {series && (
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
        </div>
      )}
      <footer class="row quiet">
        <span><Terms call={call} /></span>
        {mayDecide && <details><summary>Options</summary>
          <div class="row reasons">
            <input aria-label="Reason" value={reason} onInput={(event) => setReason(event.currentTarget.value)} placeholder="Reason (optional)" />
            {canRemember(call) && !series && !isOfNode(call) && (
              <select aria-label="Remember as a rule" value={scope} onChange={(event) => setScope(event.currentTarget.value as Scope | "")}>
                <option value="">Only this call</option>
                <option value="RULE_SCOPE_RUN">Always in this run</option>
                <option value="RULE_SCOPE_CONVERSATION">Always in this conversation</option>
                <option value="RULE_SCOPE_USER">Always, in all my runs</option>
              </select>
            )}
          </div>
          {!isOfNode(call) && (
            <form class="row" onSubmit={(event) => (event.preventDefault(), void decide("DECISION_KIND_ANSWER"))}>
              <input aria-label="Result to return instead of running the call" placeholder="Do not run it; return this result" required value={answer} onInput={(event) => setAnswer(event.currentTarget.value)} />
              <button class="second" disabled={busy}>Answer instead</button>
            </form>
          )}
        </details>}
        <Facts call={call} args={first} digest={changed ? "" : (approval.digest ?? "")} />
      </footer>
    </>
  );
}

function Terms({ call: { approval = {}, deadlineTime, category } }: { call: CallJson }): VNode {
  const needed = approval.approvalsRequired ?? 1;
  const given = approval.approvals ?? [];
  const isSoon = !!deadlineTime && Date.parse(deadlineTime) - Date.now() < EXPIRED_SOON_MS;
  return (
    <>
      {category === "TOOL_CATEGORY_DESTRUCTIVE" && <span class="badge bad">Dangerous</span>} {inPlain(approval.cause ?? "")}
      {needed > 1 && ` · ${given.length} of ${needed} people have approved${given.map(({ userId }) => `, ${visible(userId ?? "")}`).join("")}`}
      {deadlineTime && (
        <>
          {" · "}
          <span class={isSoon ? "fault" : ""} title={moment(deadlineTime)}>decide {ago(deadlineTime).replace(/^in /, "within ")}, or it does not run</span>
          {approval.escalated && ". The deadline was extended once."}
        </>
      )}
    </>
  );
}

function Facts({ call, args, digest }: { call: CallJson; args: unknown; digest: string }): VNode {
  const [shown, setShown] = useState(false);
  return (
    <details onToggle={(event) => setShown(event.currentTarget.open)}>
      <summary>Details</summary>
      {shown && (
        <>
          <Json value={args} />
          <p class="quiet digest">
            Tool {visible(call.toolName ?? "")}, version {call.toolVersion ?? 0} · call {call.callId}
            {digest && ` · the decision applies to exactly this version: ${digest.slice(0, 16)}`}
            {call.ruleId && ` · required by rule ${call.ruleId}`}
          </p>
        </>
      )}
    </details>
  );
}

export function Fields({ all }: { all: [string, unknown][] }): VNode {
  return (
    <dl class="fields">
      {all.map(([name, value]) => (
        <div key={name}>
          <dt>{visible(name)}</dt>
          <dd>{inWords(value)}</dd>
        </div>
      ))}
    </dl>
  );
}

const LINE = 200;

/** A short object as names and values, without the empty ones if there are others; anything else as JSON. */
export function Value({ value }: { value: unknown }): VNode {
  const every = entriesOf(value);
  const full = every.filter(([, each]) => each !== "" && each !== null && !(Array.isArray(each) && !each.length));
  const all = full.length ? full : every;
  return all.length && all.every(([, each]) => inWords(each).length < LINE) ? <Fields all={all} /> : <Json value={value} />;
}

const fewer = (offered: SeriesJson, chosen: SeriesJson): boolean => chosen.iterationsMax !== undefined && chosen.iterationsMax !== offered.iterationsMax;

function Diff({ before, after }: { before: Record<string, unknown>; after: Record<string, unknown> }): VNode {
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])].filter((name) => JSON.stringify(before[name]) !== JSON.stringify(after[name]));
  return (
    <div role="group" aria-label="Changes">
      <dl class="fields diff">
        {names.map((name) => (
          <div key={name}>
            <dt>{visible(name)}</dt>
            <dd><del>{name in before ? inWords(before[name]) : "–"}</del> <ins>{name in after ? inWords(after[name]) : "–"}</ins></dd>
          </div>
        ))}
      </dl>
    </div>
  );
}
