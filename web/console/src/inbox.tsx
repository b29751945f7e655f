import type { CallJson, DecisionKindJson } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { CallCard, decideAll, TopUp } from "./cards";
import { ago, forPeople, may, pendingRuns, query } from "./state";

export function Inbox(): VNode {
  const calls = forPeople.value;
  const runs = pendingRuns.value;
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
  return (
    <section class="page" onFocusCapture={({ target }) => (index.current = items().findIndex((item) => item.contains(target as Node)))}>
      <h1>Inbox</h1>
      {!calls.length && !runs.length && (
        <p class="empty">Nothing waits for you. Approvals and questions appear here automatically.</p>
      )}
      {calls.length > 0 && (
        <p class="quiet keys">
          <kbd>j</kbd> <kbd>k</kbd> to move, <kbd>a</kbd> approve, <kbd>e</kbd> edit, <kbd>r</kbd> reject, <kbd>x</kbd> select
        </p>
      )}
      {approvals.length > 1 && may("agent.v1.AgentService/DecideCalls") && (
        <Several
          selected={approvals.filter(({ callId }) => selected.has(callId ?? ""))}
          all={approvals.length}
          onAll={(on) => setSelected(new Set(on ? approvals.map(({ callId }) => callId ?? "") : []))}
          onDone={() => setSelected(new Set())}
        />
      )}
      <div>
        {calls.map((call) => (
          <CallCard key={call.callId} call={call} where>
            {approvals.length > 1 && call.state === "CALL_STATE_AWAITING_APPROVAL" && may("agent.v1.AgentService/DecideCalls") && (
              <label class="row quiet">
                <input type="checkbox" data-key="x" checked={selected.has(call.callId ?? "")} onChange={(event) => choose(call, event.currentTarget.checked)} />
                Select
              </label>
            )}
          </CallCard>
        ))}
        {runs.map((run) => (
          <TopUp key={run.runId} run={run}>
            <a href={`/runs/${run.runId}`}>A run</a> ({ago(run.updateTime)})
          </TopUp>
        ))}
      </div>
    </section>
  );
}

/** Decides about the selected calls, each with its own digest, so that a decision applies to what was shown. */
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
    <div class="card" role="group" aria-label="Bulk decision">
      <p class="buttons">
        <label class="row">
          <input type="checkbox" checked={selected.length === all} onChange={(event) => onAll(event.currentTarget.checked)} /> Select all {all}
        </label>
        <button disabled={busy || !selected.length} onClick={() => void decide("DECISION_KIND_APPROVE")}>
          Approve {selected.length}
        </button>
        <button class="second bad" disabled={busy || !selected.length} onClick={() => void decide("DECISION_KIND_REJECT")}>
          Reject {selected.length}
        </button>
      </p>
      <label class="row">
        <span class="quiet">Reason for all</span>
        <input value={reason} onInput={(event) => setReason(event.currentTarget.value)} placeholder="optional" />
      </label>
    </div>
  );
}
