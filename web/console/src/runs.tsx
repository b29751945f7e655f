import { emptyView, isEnded, requestId, type RunView } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import type { PreviewUndoResponseJson } from "../../client/gen/pawl/agent/v1/undo_pb";
import type { RunEventJson } from "../../client/gen/pawl/event/v1/event_pb";
import type { RunJson, RunStateJson } from "../../client/gen/pawl/event/v1/run_pb";
import { Json } from "./cards";
import { plain } from "./markdown";
import { ago, attempt, clock, go, may, moment, pawl, query, word } from "./state";
import { type Bar, lay, NO_BARS, type Timeline } from "./timeline";
import { RunLog } from "./view";

const VIEWS: Record<string, RunStateJson[]> = {
  all: [],
  active: ["RUN_STATE_QUEUED", "RUN_STATE_RUNNING", "RUN_STATE_WAITING", "RUN_STATE_CANCELLING"],
  waiting: ["RUN_STATE_WAITING"],
  "needs attention": ["RUN_STATE_NEEDS_ATTENTION"],
  failed: ["RUN_STATE_FAILED"],
};

export function Runs(): VNode {
  const view = query.value.get("view") ?? "all";
  const [runs, setRuns] = useState<RunJson[]>();
  const [next, setNext] = useState("");
  const load = (pageToken = ""): void =>
    void attempt(async () => {
      const states = VIEWS[view] ?? [];
      const page = await pawl.agent.listRuns({ pageSize: 50, pageToken, states, order: "RUN_ORDER_NEWEST_FIRST" });
      setRuns((all) => (pageToken ? [...(all ?? []), ...(page.runs ?? [])] : (page.runs ?? [])));
      setNext(page.nextPageToken ?? "");
    });
  useEffect(() => load(), [view]);
  return (
    <section class="page">
      <h1>Runs</h1>
      <p class="tabs" role="group" aria-label="Which runs">
        {Object.keys(VIEWS).map((name) => (
          <a key={name} href={name === "all" ? "/runs" : `/runs?view=${encodeURIComponent(name)}`} aria-current={name === view ? "true" : undefined}>
            {name}
          </a>
        ))}
        <button class="plain" onClick={() => load()}>
          Look again
        </button>
      </p>
      {runs?.length === 0 ? (
        <p class="empty">
          No such runs. <a href="/">Start one in the chat</a>.
        </p>
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label="Runs">
          <table class="list">
            <thead>
              <tr>
                <th scope="col">Run</th>
                <th scope="col">State</th>
                <th scope="col">Agent</th>
                <th scope="col">Begun</th>
                <th scope="col">Tokens</th>
                <th scope="col">Answer</th>
              </tr>
            </thead>
            <tbody>
              {runs?.map((run) => (
                <tr key={run.runId}>
                  <td>
                    <a href={`/runs/${run.runId}`}>{(run.runId ?? "").slice(-8)}</a>
                  </td>
                  <td>
                    <State run={run} />
                  </td>
                  <td>{run.job ? `job: ${run.job.toolName}` : (run.agent?.name ?? "")}</td>
                  <td title={moment(run.createTime)}>{ago(run.createTime)}</td>
                  <td>{tokens(run)}</td>
                  <td class="cut">{plain(run.failure?.message ?? run.outputText ?? "").slice(0, 160)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {next && (
        <button class="second" onClick={() => load(next)}>
          More
        </button>
      )}
    </section>
  );
}

export function RunPage({ runId }: { runId: string }): VNode {
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
          <a href="/runs">To the runs</a>
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
        <Fact name="Begun" value={<time title={moment(run.createTime)}>{ago(run.createTime)}</time>} />
        <Fact name="Ended" value={run.endTime && <time title={moment(run.endTime)}>{ago(run.endTime)}</time>} />
        <Fact name="Model" value={run.options?.model} />
        <Fact name="Agent" value={run.agent?.name} />
        <Fact name="Rounds" value={run.round} />
        <Fact name="Tokens" value={tokens(run)} />
        <Fact name="By" value={run.userId} />
        <Fact name="Above" value={run.parentRunId && <a href={`/runs/${run.parentRunId}`}>{run.parentRunId.slice(-8)}</a>} />
        <Fact
          name="Below"
          value={run.childRunIds?.length ? run.childRunIds.map((id) => <a key={id} href={`/runs/${id}`}>{id.slice(-8)} </a>) : undefined}
        />
      </dl>
      <p class="buttons">
        {!isEnded(run) && run.state && may("agent.v1.AgentService/CancelRun") && (
          <button class="second bad" onClick={() => void attempt(() => pawl.agent.cancelRun({ requestId: requestId(), runId }))}>
            Stop
          </button>
        )}
        <button class="second" onClick={() => save(view, events)}>
          Save as JSON
        </button>
        {view.ended && <Undo runId={runId} />}
      </p>
      <RunLog view={view} />
      <Bars timeline={timeline} />
      <Events events={events} />
    </section>
  );
}

function Undo({ runId }: { runId: string }): VNode | null {
  const [preview, setPreview] = useState<PreviewUndoResponseJson>();
  if (!may("agent.v1.AgentService/UndoRun")) return null;
  if (!preview)
    return (
      <button class="second" onClick={() => void attempt(async () => setPreview(await pawl.agent.previewUndo({ runId })))}>
        What would undo do?
      </button>
    );
  return (
    <div class="card">
      <h2>Undo</h2>
      <Json value={preview} />
      <button
        class="bad"
        onClick={() =>
          void attempt(async () => {
            const { run } = await pawl.agent.undoRun({ requestId: requestId(), runId });
            if (run?.runId) go(`/runs/${run.runId}`);
          })
        }
      >
        Undo it
      </button>
    </div>
  );
}

const BARS_MAX = 500;

/** The timeline: each thing is one bar, however many events it had. */
function Bars({ timeline: { bars } }: { timeline: Timeline }): VNode | null {
  if (!bars.length) return null;
  const some = bars.slice(-BARS_MAX);
  const goesOn = some.some(({ end }) => end === undefined);
  const begin = Math.min(...some.map((bar) => bar.begin));
  const end = Math.max(...some.map((bar) => bar.end ?? bar.begin), goesOn ? clock.value : 0);
  const share = (span: number): string => `${((100 * span) / Math.max(1, end - begin)).toFixed(2)}%`;
  const width = ({ begin: from, end: to = end }: Bar): number => Math.max(0, to - from);
  return (
    <details class="timeline">
      <summary>Timeline: {((end - begin) / 1000).toFixed(1)} s</summary>
      {some.length < bars.length && <p class="quiet">The last {some.length} of {bars.length}.</p>}
      <div class="scroll" tabIndex={0} role="region" aria-label="Timeline">
        <table>
          <tbody>
            {some.map((bar) => (
              <tr key={bar.id} data-bar={bar.kind}>
                <th scope="row">{plain(bar.name)}</th>
                <td class="quiet">{(width(bar) / 1000).toFixed(2)} s</td>
                <td class="lane">
                  <div class={`bar ${bar.kind}`} style={{ marginLeft: share(bar.begin - begin), width: share(width(bar)) }} />
                </td>
                <td class="quiet cut">{plain(bar.note)}</td>
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
      <span class="quiet">{seq}</span> <strong>{type}</strong> <span class="quiet">{plain(JSON.stringify(rest).slice(0, 400))}</span>
    </li>
  );
}

/** The log as it is: rows of one height, of which only those in sight are there. */
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

function Fact({ name, value }: { name: string; value: unknown }): VNode | null {
  if (value === undefined || value === "" || value === 0 || value === null) return null;
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value as VNode}</dd>
    </div>
  );
}

export function State({ run }: { run: RunJson }): VNode {
  return <span class={`chip ${run.state ?? ""}`}>{word(run.state)}</span>;
}

function tokens(run: RunJson): string {
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
