import { requestId } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { CallCard } from "./cards";
import { ago, attempt, forPeople, pawl, pendingRuns } from "./state";

export function Inbox(): VNode {
  const list = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const keys = (event: KeyboardEvent): void => {
      const target = event.target as HTMLElement;
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName)) return;
      const cards = [...(list.current?.querySelectorAll<HTMLElement>("[data-item]") ?? [])];
      const here = cards.findIndex((card) => card.contains(document.activeElement));
      if (event.key === "j" || event.key === "k") {
        event.preventDefault();
        const to = cards[Math.max(0, Math.min(cards.length - 1, here + (event.key === "j" ? 1 : -1)))];
        to?.focus();
        to?.scrollIntoView({ block: "nearest" });
      } else if (here >= 0) {
        const button = cards[here]?.querySelector<HTMLElement>(`[data-key="${CSS.escape(event.key)}"]`);
        if (button) {
          event.preventDefault();
          button.click();
        }
      }
    };
    document.addEventListener("keydown", keys);
    return () => document.removeEventListener("keydown", keys);
  }, []);
  const calls = forPeople.value;
  const runs = pendingRuns.value;
  return (
    <section class="page">
      <h1>Inbox</h1>
      {!calls.length && !runs.length && (
        <p class="empty">Nothing waits for you. What needs an approval or an answer comes here by itself.</p>
      )}
      {calls.length > 0 && (
        <p class="quiet">
          <kbd>j</kbd> <kbd>k</kbd> to move, <kbd>a</kbd> approve, <kbd>e</kbd> edit, <kbd>r</kbd> reject
        </p>
      )}
      <div ref={list}>
        {calls.map((call) => (
          <div key={call.callId} data-item tabIndex={0} role="group" aria-label={call.toolName}>
            <CallCard call={call} where />
          </div>
        ))}
        {runs.map((run) => (
          <div key={run.runId} class="card wait" data-item tabIndex={0} role="group" aria-label="A run that needs tokens">
            <p>
              <a href={`/runs/${run.runId}`}>A run</a> has used up its tokens ({ago(run.updateTime)}); it needs {run.tokensNeeded ?? "more"}.
            </p>
            <button
              onClick={() =>
                void attempt(() =>
                  pawl.agent.topUpRun({ requestId: requestId(), runId: run.runId ?? "", tokens: String(Math.max(10_000, 2 * Number(run.tokensNeeded ?? 0))) }),
                )
              }
            >
              Give it {Math.max(10_000, 2 * Number(run.tokensNeeded ?? 0))} tokens
            </button>
          </div>
        ))}
      </div>
    </section>
  );
}
