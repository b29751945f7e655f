/** Runs that need an operator: each is a card with what happened and the possible decisions. */

import { type CallJson, encode, requestId, type ResolutionJson, type RunInNeedJson } from "@pawl/client";
import type { VNode } from "preact";

import { type Action, Actions, GONE } from "../actions";
import { nameOf } from "../about";
import { Fields } from "../approval";
import { Icon } from "../design/icons";
import { time } from "../format";
import { parse } from "../json";
import { paged, type Resource } from "../resource";
import { argumentsOf, entriesOf, title } from "../sentence";
import { countNeeds, go, pawl, titleOf, who } from "../state";
import { visible } from "../visible";

const RESOLVE = "agent.v1.AgentService/ResolveCall";

function resolve({ runId = "", callId = "" }: CallJson, resolution: ResolutionJson, content?: unknown): Promise<unknown> {
  const result = content === undefined ? {} : { contentJson: encode(content) };
  return pawl.agent.resolveCall({ requestId: requestId(), runId, callId, resolution, ...result });
}

const RESOLUTIONS: Action<CallJson>[] = [
  { name: "It happened", method: RESOLVE, hint: "The run continues with the result that you enter.", ask: "Result as JSON", run: (call, text) => resolve(call, "RESOLUTION_HAPPENED", text ? parse(text) : null) },
  { name: "Run it again", method: RESOLVE, hint: "Only if it did not happen. Otherwise it happens twice.", bad: true, run: (call) => resolve(call, "RESOLUTION_RUN_AGAIN") },
  { name: "Let the model decide", method: RESOLVE, hint: "The model learns that the outcome is unknown.", run: (call) => resolve(call, "RESOLUTION_TELL_MODEL") },
];
const END: Action<RunInNeedJson> = { name: "End the run", method: "agent.v1.OperatorService/EndRun", hint: "The run fails. Nothing is undone.", bad: true, ask: "Reason", run: async ({ runId = "" }, reason) => (await pawl.operator.endRun({ requestId: requestId(), runId, reason }), GONE) };
const RETRY: Action<RunInNeedJson> = { name: "Retry", method: "agent.v1.OperatorService/RedriveRun", hint: "The run continues where it stopped. Remove the cause first.", ask: "Reason", run: async ({ runId = "" }, reason) => (await pawl.operator.redriveRun({ requestId: requestId(), runId, reason }), GONE) };

const isDoubt = ({ attention: need }: RunInNeedJson): boolean => need?.reason === "ATTENTION_REASON_UNKNOWN_OUTCOME";

function nameOfNeed(run: RunInNeedJson): string {
  const { calls: [call] = [], crashCount = 0, round = 0 } = run;
  if (!isDoubt(run)) return `A run crashed ${crashCount} times in round ${round}`;
  return call ? `Did “${title(call.toolName)}” happen?` : "Did a call happen?";
}

export const attention: Resource<RunInNeedJson> = {
  path: "attention",
  lead: "Stopped runs. An operator must decide how each one continues.",
  empty: "No run needs an operator. Runs appear here if it is unknown whether a call took effect, or if their workers crash repeatedly.",
  list: paged("runs", (page) => pawl.operator.listAttention(page)),
  live: true,
  id: ({ runId }) => runId ?? "",
  get: async (runId) => (await pawl.operator.listAttention({ runId })).runs?.[0],
  title: (run) => (isDoubt(run) ? "A call with an unknown outcome" : "A run that crashes"),
  columns: [],
  card: (run, reload) => <Need key={run.runId} run={run} onDone={() => (reload(), void countNeeds())} />,
  below: (run) => <Need run={run} onDone={() => (go("/attention"), void countNeeds())} />,
};

function Need({ run, onDone }: { run: RunInNeedJson; onDone: () => void }): VNode {
  const { runId = "", userId = "", conversationId = "", calls = [], attention: need } = run;
  const agent = calls[0]?.agentName;
  return (
    <article class="card bad" data-item tabIndex={-1} aria-label={nameOfNeed(run)}>
      <header class="ask">
        <Icon name="attention" />
        <div>
          <h2><a href={`/attention/${runId}`}>{nameOfNeed(run)}</a></h2>
          <p class="quiet">
            {agent && agent !== "default" && <>{visible(agent)} · </>}for {visible(userId)} ·{" "}
            {userId === who.value?.caller?.userId && conversationId && <><a href={`/c/${conversationId}`}>{nameOf(titleOf(conversationId))}</a> · </>}
            <a href={`/runs/${runId}`}>run</a> · {time(need?.sinceTime)}
          </p>
        </div>
      </header>
      {!isDoubt(run) && <><p>Its workers stopped each time, so the run is not started again.</p><Actions all={[RETRY, END]} item={run} onDone={onDone} gone={onDone} /></>}
      {isDoubt(run) && calls.map((call) => (
        <div key={call.callId}>
          <p>The process that ran it stopped before it reported a result. The run waits until you decide.</p>
          <Fields all={entriesOf(argumentsOf(call))} />
          {call.state === "CALL_STATE_RUNNING" && <Actions all={RESOLUTIONS} item={call} onDone={onDone} />}
        </div>
      ))}
      {isDoubt(run) && <Actions all={[END]} item={run} onDone={onDone} gone={onDone} />}
    </article>
  );
}
