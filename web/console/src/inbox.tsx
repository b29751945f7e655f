import type { CallJson, DecisionKindJson } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { CallCard, Decided, TopUp } from "./cards";
import { decideAll, made } from "./decide";
import { Icon } from "./design/icons";
import { Empty } from "./design/parts";
import { objectOf, title } from "./sentence";
import { ago, forPeople, may, pawl, pendingRuns, query, who } from "./state";

/** How long a decided call stays, so that the user sees who decided what. */
const LEAVES_MS = 6000;

export function Inbox(): VNode {
  const calls = forPeople.value;
  const runs = pendingRuns.value;
  const decided = useDecided(calls);
  // A decided call keeps its position.
  const order = useRef<(string | undefined)[]>([]);
  const ids = calls.map(({ callId }) => callId);
  if (ids.some((id) => !order.current.includes(id))) order.current = [...order.current.filter((id) => !ids.includes(id)), ...ids];
  const inOrder = [...calls, ...decided].sort((one, other) => order.current.indexOf(one.callId) - order.current.indexOf(other.callId));
  const approvals = calls.filter(({ state }) => state === "CALL_STATE_AWAITING_APPROVAL");
  const [selected, setSelected] = useState<ReadonlySet<string>>(new Set());
  const choose = (call: CallJson, on: boolean): void => {
    const next = new Set(selected);
    if (on) next.add(call.callId ?? "");
    else next.delete(call.callId ?? "");
    setSelected(next);
  };
  // The call that a notification links to.
  const wanted = query.value.get("call");
  const isThere = calls.some(({ callId }) => callId === wanted);
  useEffect(() => {
    if (!wanted || !isThere) return;
    const item = document.querySelector(`[data-call="${CSS.escape(wanted)}"]`)?.closest<HTMLElement>("[data-item]");
    item?.focus();
    item?.scrollIntoView({ block: "nearest" });
  }, [wanted, isThere]);
  // A decided item may disappear. The focus then moves to the next one.
  const index = useRef(-1);
  const items = (): HTMLElement[] => [...document.querySelectorAll<HTMLElement>("main [data-item]")];
  useEffect(() => {
    if (index.current < 0 || document.activeElement !== document.body) return;
    const left = items();
    (left[Math.min(index.current, left.length - 1)] ?? document.getElementById("main"))?.focus();
  }, [calls.length]);
  const chosen = approvals.filter(({ callId }) => selected.has(callId ?? ""));
  const maySelect = approvals.length > 1 && may("agent.v1.AgentService/DecideCalls");
  return (
    <section class="page narrow inbox" onFocusCapture={({ target }) => (index.current = items().findIndex((item) => item.contains(target as Node)))}>
      <div class="head">
        <h1>Inbox</h1>
        {calls.length + runs.length > 0 && <span class="badge warn">{calls.length + runs.length} waiting</span>}
        {maySelect && !chosen.length && <button class="plain small" onClick={() => setSelected(new Set(approvals.map(({ callId }) => callId ?? "")))}>Select all {approvals.length} approvals</button>}
        {calls.length > 0 && (
          <span class="quiet keys">
            <kbd>j</kbd> <kbd>k</kbd> move · <kbd>a</kbd> approve · <kbd>e</kbd> edit · <kbd>r</kbd> reject{maySelect && <> · <kbd>x</kbd> select</>}
          </span>
        )}
      </div>
      {!calls.length && !runs.length && !decided.length && (
        <Empty icon="inbox" title="Nothing waits for you"><p>Approvals and questions of your agents appear here automatically.</p></Empty>
      )}
      {maySelect && chosen.length > 0 && (
        <Several
          selected={chosen}
          all={approvals.length}
          onAll={(on) => setSelected(new Set(on ? approvals.map(({ callId }) => callId ?? "") : []))}
          onDone={() => setSelected(new Set())}
        />
      )}
      {inOrder.map((call) =>
        decided.includes(call) ? <Gone key={call.callId} call={call} /> : (
          <CallCard key={call.callId} call={call} where>
            {maySelect && call.state === "CALL_STATE_AWAITING_APPROVAL" && (
              <label class="select">
                <input type="checkbox" data-key="x" aria-label="Select" checked={selected.has(call.callId ?? "")} onChange={(event) => choose(call, event.currentTarget.checked)} />
              </label>
            )}
          </CallCard>
        ),
      )}
      {runs.map((run) => <TopUp key={run.runId} run={run}><a href={`/runs/${run.runId}`}>A run</a> ({ago(run.updateTime)})</TopUp>)}
    </section>
  );
}

/** Calls that have left the inbox, shown briefly with their decisions. */
function useDecided(calls: CallJson[]): CallJson[] {
  const [decided, setDecided] = useState<CallJson[]>([]);
  const before = useRef<CallJson[]>([]);
  useEffect(() => {
    const left = before.current.filter(({ callId }) => !calls.some((call) => call.callId === callId));
    before.current = calls;
    const show = (call: CallJson | undefined): void => {
      if (!call?.approval?.decision) return;
      const others = (all: CallJson[]): CallJson[] => all.filter(({ callId }) => callId !== call.callId);
      setDecided((all) => [...others(all), call]);
      setTimeout(() => setDecided(others), LEAVES_MS);
    };
    for (const call of left) {
      const decision = made.get(call.callId ?? "");
      if (decision) show({ ...call, approval: { ...call.approval, decision } });
      // Other users' calls cannot be read once they are decided.
      else if (call.userId === who.value?.caller?.userId)
        pawl.agent.listCalls({ runId: call.runId ?? "", pageSize: 200 }).then(({ calls: all = [] }) => show(all.find(({ callId }) => callId === call.callId)), () => {});
    }
  }, [calls]);
  return decided;
}

function Gone({ call }: { call: CallJson }): VNode {
  const isDone = call.approval?.decision?.kind !== "DECISION_KIND_REJECT";
  return (
    <div class={`card gone ${isDone ? "good" : ""}`} role="status">
      <Icon name={isDone ? "check" : "close"} />
      <strong>{title(call.toolName)}</strong>
      <span class="object">{objectOf(call)}</span>
      <Decided call={call} />
    </div>
  );
}

/** Decides on the selected calls. Each decision has the digest of the call as it was shown. */
function Several({ selected, all, onAll, onDone }: { selected: CallJson[]; all: number; onAll: (on: boolean) => void; onDone: () => void }): VNode {
  const [reason, setReason] = useState("");
  const [busy, setBusy] = useState(false);
  const decide = async (kind: DecisionKindJson): Promise<void> => {
    setBusy(true);
    await decideAll(selected, (call) => ({ kind, digest: call.approval?.digest ?? "", reason }));
    setBusy(false);
    setReason("");
    onDone();
  };
  return (
    <div class="several" role="group" aria-label="Bulk decision">
      <label class="row"><input type="checkbox" checked={selected.length === all} onChange={(event) => onAll(event.currentTarget.checked)} /> {selected.length} of {all} selected</label>
      <input aria-label="Reason for all" value={reason} onInput={(event) => setReason(event.currentTarget.value)} placeholder="Reason for all (optional)" />
      <button disabled={busy} onClick={() => void decide("DECISION_KIND_APPROVE")}>Approve {selected.length}</button>
      <button class="second bad" disabled={busy} onClick={() => void decide("DECISION_KIND_REJECT")}>Reject {selected.length}</button>
    </div>
  );
}
