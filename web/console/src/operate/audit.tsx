/** The audit log as sentences, with filters, and the check of its chain. */

import { signal } from "@preact/signals";
import type { AuditEntryJson, AuditKindJson, RunJson, VerifyAuditResponseJson } from "@pawl/client";
import type { VNode } from "preact";

import { aboutOf } from "../about";
import { Badge, type Tone } from "../design/parts";
import { agentOptions, toolOptions } from "../editing/options";
import { groups, type Resource } from "../resource";
import { attempt, lasted, pawl, word } from "../state";
import { visible } from "../visible";

const VERIFY = "tool.v1.AuditService/VerifyAudit";
const LABELS: Record<string, string> = { PROPOSED: "Call checked", DECIDED: "Decision", EXECUTED: "Call started", RETURNED: "Call ended", RULE: "Rule changed" };
const TONES: Record<string, Tone> = { APPROVE: "ok", EDIT: "ok", SUCCEEDED: "ok", REJECT: "bad", FAILED: "bad", REFUSED: "bad", GATED: "warn", OUTCOME_UNKNOWN: "bad" };
const CHECKS: Record<string, string> = { RUN: "allowed", APPROVE: "needs approval", OFFER: "for a front end", ASK: "for a person", REFUSE: "refused", DELEGATE: "for a child run" };
const DECISIONS: Record<string, string> = { APPROVE: "approved", EDIT: "edited and approved", REJECT: "rejected", ANSWER: "answered" };

/** An audit entry as a sentence. */
export function sentenceOf({ kind, verdict = "", reason = "", userId = "", byUserId = "", toolName = "", agentName = "", durationSeconds }: AuditEntryJson): string {
  const whose = userId ? ` for ${userId}` : "";
  const agent = agentName ? `Agent ${agentName}` : "An agent";
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

const kindOf = ({ kind }: AuditEntryJson): string => (kind ?? "").replace("AUDIT_KIND_", "");
const exact = (at: string | undefined): VNode => <time title={at}>{at && new Date(at).toLocaleTimeString(undefined, { hourCycle: "h23" })}</time>;

/** The entries of each call together. Calls of a tool in a run that follow each other are one if they ended alike. Entries of rules stay alone. */
function byCall(entries: AuditEntryJson[]): AuditEntryJson[][] {
  const found: AuditEntryJson[][] = [];
  for (const call of groups(entries, ({ callId, seq }) => callId || `${seq}`)) {
    const [last, first] = [found.at(-1)?.[0], call[0]];
    if (last?.runId && last.runId === first?.runId && last.toolName === first.toolName && last.verdict === first.verdict) found.at(-1)!.push(...call);
    else found.push(call);
  }
  return found;
}

/** What came of a call: its result, or how far it is. */
function outcomeOf(entries: AuditEntryJson[]): [Tone, string] {
  const of = (kind: string): AuditEntryJson | undefined => entries.find((each) => kindOf(each) === kind);
  const [ended, decided, proposed, rule] = [of("RETURNED"), of("DECIDED"), of("PROPOSED"), of("RULE")];
  const took = Number(ended?.durationSeconds ?? 0);
  if (ended) return [TONES[ended.verdict ?? ""] ?? "grey", `${word(ended.verdict)}${took ? `, ${lasted(took)}` : ""}`];
  if (of("EXECUTED")) return ["info", "started"];
  if (decided) return [TONES[decided.verdict ?? ""] ?? "grey", DECISIONS[decided.verdict ?? ""] ?? word(decided.verdict)];
  if (proposed) return [TONES[proposed.verdict ?? ""] ?? "grey", CHECKS[proposed.verdict ?? ""] ?? "checked"];
  return ["grey", rule?.verdict === "REVOKED" ? "rule revoked" : "rule made"];
}

/** A call that unfolds to its entries. */
function Call({ entries }: { entries: AuditEntryJson[] }): VNode {
  const [newest = {}] = entries;
  const [tone, outcome] = outcomeOf(entries);
  const run = named.value.get(newest.runId ?? "");
  const calls = new Set(entries.map(({ callId }) => callId)).size;
  return (
    <details class="folded">
      <summary data-item>
        <span class="quiet stamp">{exact(newest.time)}</span>
        <strong class="cut">{visible(newest.toolName ?? "")} {calls > 1 && <span class="quiet">{calls} calls</span>}</strong>
        <span class="about quiet cut">{run && (aboutOf(run) || `Run ${newest.runId?.slice(-8)}`)}</span>
        <span><Badge tone={tone}>{outcome}</Badge></span>
        <span class="by quiet cut">{[newest.userId || newest.byUserId, newest.agentName].filter(Boolean).join(", ")}</span>
      </summary>
      <Entries all={entries} />
    </details>
  );
}

const named = signal<ReadonlyMap<string, RunJson>>(new Map()); // The latest runs.
const readRuns = async (): Promise<void> => void (named.value = new Map((await pawl.agent.listRuns({ pageSize: 200 })).runs?.map((run) => [run.runId ?? "", run])));

function Entries({ all }: { all: AuditEntryJson[] }): VNode {
  return (
    <ol>
      {all.toReversed().map((each) => <li key={each.seq}><span class="quiet stamp">{exact(each.time)}</span><span>{visible(sentenceOf(each))} <span class="quiet">entry {each.seq}</span></span></li>)}
      {all[0]?.runId && <li><span class="stamp" /><a href={`/runs/${all[0].runId}`}>Open the run</a></li>}
    </ol>
  );
}

export const audit: Resource<AuditEntryJson[]> = {
  path: "audit",
  lead: "Calls that agents proposed, the decisions on them, and their results. Changes to entries are detected.",
  empty: "No matching entries.",
  list: async (pageToken, { find = "", call = "", tool = "", agent = "", kind = "", since = "", before = "" }) => {
    const only = {
      ...(find.startsWith("run_") ? { runId: find } : { userId: find }),
      callId: call,
      toolName: tool,
      agentName: agent,
      ...(kind ? { kind: `AUDIT_KIND_${kind}` as AuditKindJson } : {}),
      ...(since ? { sinceTime: new Date(`${since}T00:00`).toISOString() } : {}),
      ...(before ? { beforeTime: new Date(`${before}T00:00`).toISOString() } : {}),
    };
    if (!pageToken) void attempt(readRuns, true);
    const page = await pawl.audit.listAudit({ pageSize: 200, pageToken, ...only });
    return { items: byCall(page.entries ?? []), next: page.nextPageToken };
  },
  filters: [
    { name: "find", label: "User or run ID" },
    { name: "tool", label: "Tool", load: toolOptions },
    { name: "agent", label: "Agent", load: async () => [["default", ""], ...(await agentOptions())] },
    { name: "kind", label: "Kind", options: Object.keys(LABELS), labels: LABELS },
    { name: "since", label: "From", date: true },
    { name: "before", label: "Before", date: true },
  ],
  id: ([entry]) => String(entry?.seq ?? ""), title: ([entry]) => entry?.toolName ?? "", columns: [],
  below: (entries) => <Entries all={entries} />,
  at: ([entry]) => entry?.time,
  entry: (entries) => <Call entries={entries} />,
  all: [{ name: "Check for tampering", method: VERIFY, run: () => verify() }],
};

/** Verifies the audit chain, and shows where it is broken. */
const verify = (): Promise<string> =>
  new Promise((done, fail) => {
    const leave = pawl.streams.subscribe<VerifyAuditResponseJson>({
      method: `pawl.${VERIFY}`,
      request: () => ({}),
      message: ({ done: isDone, problem, verifiedSeq = "0" }) => {
        if (!isDone && !problem) return;
        leave();
        done(problem ? `The first invalid entry is ${problem.seq}: ${problem.explanation}` : `All ${verifiedSeq} entries are intact.`);
      },
      end: (error) => error && fail(error),
    });
  });
