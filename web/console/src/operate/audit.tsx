/** The audit log as sentences, with filters, and the check of its chain. */

import type { AuditEntryJson, AuditKindJson, VerifyAuditResponseJson } from "@pawl/client";
import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Badge, type Tone } from "../design/parts";
import { runLink, time } from "../format";
import { Entry, type Resource } from "../resource";
import { lasted, pawl, word } from "../state";

const KINDS = ["PROPOSED", "DECIDED", "EXECUTED", "RETURNED", "RULE"] as const;
const LABELS: Record<string, string> = { PROPOSED: "Call checked", DECIDED: "Decision", EXECUTED: "Call started", RETURNED: "Call ended", RULE: "Rule changed" };
const TONES: Record<string, Tone> = { APPROVE: "ok", EDIT: "ok", SUCCEEDED: "ok", REJECT: "bad", FAILED: "bad", REFUSED: "bad", GATED: "warn", OUTCOME_UNKNOWN: "bad" };
const CHECKS: Record<string, string> = { RUN: "allowed", APPROVE: "needs approval", OFFER: "for a front end", ASK: "for a person", REFUSE: "refused", DELEGATE: "for a child run" };
const DECISIONS: Record<string, string> = { APPROVE: "approved", EDIT: "edited and approved", REJECT: "rejected", ANSWER: "answered" };

/** An audit entry as a sentence. */
export function sentenceOf({ kind, verdict = "", reason = "", userId = "", byUserId = "", toolName = "", agentName = "", durationSeconds }: AuditEntryJson): string {
  const whose = userId ? ` for ${userId}` : "";
  const agent = agentName && agentName !== "default" ? agentName : "An agent";
  const why = reason ? ` (${word(reason)})` : "";
  switch ((kind ?? "").replace("AUDIT_KIND_", "")) {
    case "PROPOSED":
      return `${agent} proposed ${toolName}${whose}: ${CHECKS[verdict] ?? "checked"}${why}`;
    case "DECIDED":
      return `${byUserId || "Someone"} ${DECISIONS[verdict] ?? word(verdict)} a call of ${toolName}${whose}${why}`;
    case "EXECUTED":
      return `${toolName} started${whose}${verdict === "APPROVED" ? ", as approved" : verdict === "RULE" ? `, as a rule allows${why}` : ""}`;
    case "RETURNED":
      return `${toolName} ${word(verdict)}${durationSeconds ? ` after ${lasted(Number(durationSeconds))}` : ""}${byUserId ? `, result by ${byUserId}` : ""}${why}`;
    case "RULE":
      return `${byUserId || userId} ${verdict === "REVOKED" ? "revoked" : "made"} a rule for ${toolName}`;
    default:
      return `${word(kind)} ${toolName}`;
  }
}

export const audit: Resource<AuditEntryJson> = {
  path: "audit",
  lead: "Calls that agents proposed, the decisions on them, and their results. Changes to entries are detected.",
  empty: "No matching entries.",
  list: async (pageToken, { run = "", call = "", tool = "", user = "", agent = "", kind = "", since = "", before = "" }) => {
    const only = {
      runId: run,
      callId: call,
      toolName: tool,
      userId: user,
      agentName: agent,
      ...(kind ? { kind: `AUDIT_KIND_${kind}` as AuditKindJson } : {}),
      ...(since ? { sinceTime: new Date(`${since}T00:00`).toISOString() } : {}),
      ...(before ? { beforeTime: new Date(`${before}T00:00`).toISOString() } : {}),
    };
    const page = await pawl.audit.listAudit({ pageSize: 100, pageToken, ...only });
    return { items: page.entries ?? [], next: page.nextPageToken };
  },
  filters: [
    { name: "kind", label: "Kind", options: KINDS, labels: LABELS },
    { name: "tool", label: "Tool" },
    { name: "user", label: "User" },
    { name: "agent", label: "Agent" },
    { name: "run", label: "Run" },
    { name: "since", label: "From", date: true },
    { name: "before", label: "Before", date: true },
  ],
  id: ({ seq }) => String(seq ?? ""),
  title: (entry) => sentenceOf(entry),
  columns: [
    { name: "Number", of: ({ seq }) => seq },
    { name: "Kind", of: ({ kind }) => LABELS[(kind ?? "").replace("AUDIT_KIND_", "")] },
    { name: "When", of: (each) => time(each.time) },
    { name: "Tool", of: ({ toolName }) => toolName },
    { name: "Verdict", of: ({ verdict, reason }) => [word(verdict), word(reason)].filter(Boolean).join(": ") },
    { name: "User", of: ({ userId }) => userId },
    { name: "By", of: ({ byUserId }) => byUserId },
    { name: "Agent", of: ({ agentName }) => agentName },
    { name: "Run", of: ({ runId }) => runLink(runId) },
  ],
  at: ({ time: at }) => at,
  entry: (each) => (
    <Entry tone={TONES[each.verdict ?? ""] ?? ""} to={`/audit/${each.seq}`} name={sentenceOf(each)} at={each.time}>
      {LABELS[(each.kind ?? "").replace("AUDIT_KIND_", "")]} {runLink(each.runId)}
    </Entry>
  ),
  above: () => <Verify />,
};

/** Verifies the audit chain, and shows where it is broken. */
function Verify(): VNode {
  const [state, setState] = useState<VerifyAuditResponseJson>();
  const [fault, setFault] = useState("");
  const start = (): void => {
    setState({});
    setFault("");
    const leave = pawl.streams.subscribe<VerifyAuditResponseJson>({
      method: "pawl.tool.v1.AuditService/VerifyAudit",
      request: () => ({}),
      message: (message) => {
        setState(message);
        if (message.done || message.problem) leave();
      },
      end: (error) => error && setFault(error.message),
    });
  };
  return (
    <>
      <span role="status">
        {fault && <span class="fault">{fault}</span>}
        {state?.problem && <span class="fault">{`The first invalid entry is ${state.problem.seq}: ${state.problem.explanation}`}</span>}
        {state && !fault && !state.problem && (state.done ? <Badge tone="ok">{`All ${state.verifiedSeq ?? 0} entries are intact.`}</Badge> : `${state.verifiedSeq ?? 0} verified ...`)}
      </span>
      <button class="second" onClick={start}>Verify the chain</button>
    </>
  );
}
