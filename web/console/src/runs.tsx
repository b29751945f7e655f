import {
  type CallUndoJson,
  emptyView,
  isEnded,
  requestId,
  type RunEventJson,
  type RunJson,
  type RunStateJson,
  type RunView,
} from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { Badge, toneOf } from "./design/parts";
import { type Column, Table } from "./design/table";
import { Below, type Resource } from "./resource";
import { ago, attempt, clock, go, lasted, may, moment, pawl, STATES, word } from "./state";
import { type Bar, lay, NO_BARS, type Timeline } from "./timeline";
import { RunLog } from "./view";
import { visible } from "./visible";

const ACTIVE: RunStateJson[] = ["RUN_STATE_QUEUED", "RUN_STATE_RUNNING", "RUN_STATE_WAITING", "RUN_STATE_CANCELLING"];

export const runs: Resource<RunJson> = {
  path: "runs",
  empty: "No matching runs. Runs from the chat, schedules, triggers and programs appear here.",
  live: true,
  list: async (pageToken, { state = "", agent = "", workflow = "", parent = "", conversation = "" }) => {
    const states = state === "active" ? ACTIVE : (Object.keys(STATES).filter((each) => STATES[each] === state) as RunStateJson[]);
    const page = await pawl.agent.listRuns({ pageSize: 50, pageToken, states, agent, workflow, parentRunId: parent, conversationId: conversation });
    return { items: page.runs ?? [], next: page.nextPageToken };
  },
  filters: [
    { name: "state", label: "State", options: ["active", ...Object.values(STATES)] },
    { name: "agent", label: "Agent" },
    { name: "workflow", label: "Workflow" },
    { name: "parent", label: "Parent run" },
    { name: "conversation", label: "Conversation" },
  ],
  id: ({ runId }) => runId ?? "",
  columns: [
    { name: "Run", of: ({ runId }) => runId?.slice(-8) },
    { name: "State", of: (run) => <State run={run} /> },
    { name: "Agent", of: (run) => (run.workflow ? `workflow: ${run.workflow.name}` : run.job ? `job: ${visible(run.job.toolName ?? "")}` : (run.agent?.name ?? "default")) },
    { name: "Started", of: ({ createTime }) => <time title={moment(createTime)}>{ago(createTime)}</time> },
    { name: "Tokens", of: tokens },
    { name: "Answer", of: (run) => <span class="cut">{visible(run.failure?.message ?? run.outputText ?? "").slice(0, 160)}</span> },
  ],
};

/** A run, on its own page or `beside` the chat, which shows its log. */
export function RunPage({ runId, beside }: { runId: string; beside?: true }): VNode {
  const [view, setView] = useState<RunView>(emptyView({ runId }));
  const [events, setEvents] = useState<RunEventJson[]>([]);
  const [timeline, setTimeline] = useState(NO_BARS);
  const [fault, setFault] = useState("");
  useEffect(
    () =>
      pawl.watchRun(
        runId,
        (now, fresh) => {
          setView(now);
          setEvents((all) => [...all, ...fresh]);
          setTimeline((before) => lay(before, fresh));
        },
        (error) => setFault(error.message),
      ),
    [runId],
  );
  const { run } = view;
  if (fault)
    return (
      <section class="page">
        <h1>This run cannot be shown</h1>
        <p class="fault">{fault}</p>
        <p>
          <a href="/runs">Go to runs</a>
        </p>
      </section>
    );
  return (
    <section class="page run">
      <h1>
        Run {runId.slice(-8)} <State run={run} />
      </h1>
      <dl class="facts">
        <Fact name="Conversation" value={run.conversationId && <a href={`/c/${run.conversationId}`}>{run.conversationId.slice(-8)}</a>} />
        <Fact name="Started" value={<time title={moment(run.createTime)}>{ago(run.createTime)}</time>} />
        <Fact name="Ended" value={run.endTime && <time title={moment(run.endTime)}>{ago(run.endTime)}</time>} />
        <Fact name="Model" value={run.options?.model} />
        <Fact name="Agent" value={run.agent?.name} />
        <Fact name="Workflow" value={run.workflow && <a href={`/workflows/runs/${runId}`}>{run.workflow.name}</a>} />
        <Fact name="Rounds" value={run.round} />
        <Fact name="Tokens" value={tokens(run)} />
        <Fact name="User" value={run.userId} />
        <Fact name="Parent run" value={run.parentRunId && <a href={`/runs/${run.parentRunId}`}>{run.parentRunId.slice(-8)}</a>} />
        <Fact
          name="Child runs"
          value={Object.values(view.calls).some(({ childRunId }) => childRunId) && <a href={`/runs?parent=${runId}`}>Show child runs</a>}
        />
      </dl>
      <div class="buttons">
        {!isEnded(run) && run.state && may("agent.v1.AgentService/CancelRun") && (
          <button class="second bad" onClick={() => void attempt(() => pawl.agent.cancelRun({ requestId: requestId(), runId }))}>
            Stop
          </button>
        )}
        <button class="second" onClick={() => save(view, events)}>
          Save as JSON
        </button>
        {view.ended && !run.undo && <Undo runId={runId} />}
      </div>
      {run.undo && <UndoReport key={run.state} runId={runId} of={run.undo.runId ?? ""} />}
      {!beside && <RunLog view={view} />}
      <Bars timeline={timeline} open={beside} />
      <Events events={events} />
    </section>
  );
}

const UNDO: Column<CallUndoJson>[] = [
  { name: "Call", of: ({ toolName }) => visible(toolName || "earlier calls of the series") },
  { name: "Undo", of: ({ state }) => word(state?.replace("UNDO_STATE_", "")) },
  { name: "Effect", of: ({ summary, reason }) => <span class="cut">{visible([summary, reason].filter(Boolean).join(": "))}</span> },
  { name: "Undo run", of: ({ undoRunId: id }) => id && <a href={`/runs/${id}`}>{id.slice(-8)}</a> },
];

function Undo({ runId }: { runId: string }): VNode | null {
  const [calls, setCalls] = useState<CallUndoJson[]>();
  if (!may("agent.v1.AgentService/UndoRun")) return null;
  const does = calls?.some(({ state }) => state === "UNDO_STATE_TO_UNDO");
  if (!calls)
    return (
        <button class="second" onClick={() => void attempt(async () => setCalls((await pawl.agent.previewUndo({ runId })).calls ?? []))}>
          Preview undo
        </button>
    );
  return (
    <div class="card">
      <h2>Undo</h2>
      {!!calls.length && <Table name="Undo preview" columns={UNDO} items={calls} />}
      {!does && <p class="quiet">There is nothing to undo.</p>}
      <p class="buttons">
        {does && (
          <button
            class="bad"
            onClick={() =>
              void attempt(async () => {
                const { run } = await pawl.agent.undoRun({ requestId: requestId(), runId });
                if (run?.runId) go(`/runs/${run.runId}`);
              })
            }
          >
            Undo now
          </button>
        )}
        <button class="second" onClick={() => setCalls(undefined)}>
          Cancel
        </button>
      </p>
    </div>
  );
}

/** The outcome of an undo. */
function UndoReport({ runId, of }: { runId: string; of: string }): VNode {
  return (
    <div class="card">
      <p>
        This run undoes <a href={`/runs/${of}`}>another run</a>.
      </p>
      <Below name="Undo report" method="agent.v1.AgentService/GetUndoReport" load={async () => (await pawl.agent.getUndoReport({ runId })).calls} columns={UNDO} />
    </div>
  );
}

const BARS_MAX = 500;

/** The timeline, with one bar per round, call or wait. */
function Bars({ timeline: { bars }, open }: { timeline: Timeline; open: true | undefined }): VNode | null {
  if (!bars.length) return null;
  const some = bars.slice(-BARS_MAX);
  const isOpen = some.some(({ end }) => end === undefined);
  const start = Math.min(...some.map((bar) => bar.start));
  const end = Math.max(...some.map((bar) => bar.end ?? bar.start), isOpen ? clock.value : 0);
  const share = (span: number): string => `${((100 * span) / Math.max(1, end - start)).toFixed(2)}%`;
  const width = ({ start: from, end: to = end }: Bar): number => Math.max(0, to - from);
  return (
    <details class="timeline" open={open}>
      <summary>Timeline: {lasted((end - start) / 1000)}</summary>
      {some.length < bars.length && <p class="quiet">Showing the last {some.length} of {bars.length}.</p>}
      <div class="scroll" tabIndex={0} role="region" aria-label="Timeline">
        <table>
          <tbody>
            {some.map((bar) => (
              <tr key={bar.id} data-bar={bar.kind}>
                <th scope="row">{visible(bar.name)}</th>
                <td class="quiet">{lasted(width(bar) / 1000)}</td>
                <td class="lane">
                  <div class={`bar ${bar.kind} ${bar.bad ? "bad" : ""}`} style={{ marginLeft: share(bar.start - start), width: share(width(bar)) }} />
                </td>
                <td class="quiet cut">{visible(bar.note)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}

function row({ seq, type, time: _t, storeId: _s, conversationId: _c, runId: _r, eventId: _e, attempt: _a, ...rest }: RunEventJson): VNode {
  return (
    <li key={seq}>
      <span class="quiet">{seq}</span> <strong>{type}</strong> <span class="quiet">{visible(JSON.stringify(rest).slice(0, 400))}</span>
    </li>
  );
}

/** The event log. Only visible rows are rendered. */
function Events({ events }: { events: RunEventJson[] }): VNode {
  const [shown, setShown] = useState(false);
  const [top, setTop] = useState(0);
  const height = 28;
  const first = Math.max(0, Math.floor(top / height) - 10);
  const some = events.slice(first, first + 60);
  return (
    <details onToggle={(event) => setShown(event.currentTarget.open)}>
      <summary>Events: {events.length}</summary>
      {shown && (
        <div class="events" tabIndex={0} role="region" aria-label="Events" onScroll={(event) => setTop(event.currentTarget.scrollTop)}>
          <div style={{ height: `${events.length * height}px` }}>
            <ol style={{ transform: `translateY(${first * height}px)` }}>
              {some.map(row)}
            </ol>
          </div>
        </div>
      )}
    </details>
  );
}

export function Fact({ name, value }: { name: string; value: unknown }): VNode | null {
  if (!value) return null;
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value as VNode}</dd>
    </div>
  );
}

export function State({ run }: { run: RunJson }): VNode {
  return <Badge tone={toneOf(run.state)}>{word(run.state)}</Badge>;
}

export function tokens(run: RunJson): string {
  const usage = run.usage;
  const sum = Number(usage?.inputTokens ?? 0) + Number(usage?.outputTokens ?? 0);
  return sum ? sum.toLocaleString() : "";
}

function save(view: RunView, events: RunEventJson[]): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({ ...view, events }, null, 2)], { type: "application/json" }));
  link.download = `${view.run.runId}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}
