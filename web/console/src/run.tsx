/** The page of a run: why it waits, its timeline, messages, calls and events. */

import { type CallJson, emptyView, type GetRoundResponseJson, isEnded, requestId, type RunEventJson, type RunJson, type RunView } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { Actions } from "./actions";
import { Value } from "./approval";
import { Decided } from "./cards";
import { fork } from "./conversations";
import { Icon } from "./design/icons";
import { Badge, Fact, Head, Menu, Missing, Skeleton, Tabs, toneOf } from "./design/parts";
import { Rows } from "./design/rows";
import { time } from "./format";
import { Json } from "./form";
import { useRead } from "./resource";
import { kindOf, nameOfRun, runs, State, tokens, Why } from "./runs";
import { attempt, clock, lasted, may, moment, pawl, word } from "./state";
import { type Bar, lay, NO_BARS, type Part, type Timeline } from "./timeline";
import { argumentsOf, read, title } from "./sentence";
import { Undo, UndoReport } from "./undo";
import { RunLog } from "./view";
import { visible } from "./visible";

type Tab = "messages" | "calls" | "events" | "request";

/** A run, on its own page or `beside` the chat, which shows its messages. */
export function RunPage({ runId, beside }: { runId: string; beside?: true }): VNode {
  const [view, setView] = useState<RunView>(emptyView({ runId }));
  const [events, setEvents] = useState<RunEventJson[]>([]);
  const [timeline, setTimeline] = useState(NO_BARS);
  const [fault, setFault] = useState("");
  const [tab, setTab] = useState<Tab>(beside ? "calls" : "messages");
  const [round, setRound] = useState(0);
  const [undoing, setUndoing] = useState(false);
  const shown = (now: RunView, fresh: RunEventJson[]): void => {
    setView(now);
    setEvents((all) => [...all, ...fresh]);
    setTimeline((before) => lay(before, fresh));
  };
  useEffect(() => pawl.watchRun(runId, shown, (error) => setFault(error.message)), [runId]);
  const { run } = view;
  const name = nameOfRun(run);
  const waiting = useWaiting(run);
  if (fault)
    return <Missing icon="runs" title="This run cannot be shown" fault={fault} to="/runs" name="runs" />;
  const calls = Object.values(view.calls);
  const { text: asked = "", number = "" } = events.find(({ messageAdded }) => messageAdded?.message?.role === "ROLE_USER")?.messageAdded?.message ?? {};
  const tabs: [Tab, string][] = [["calls", `Calls ${calls.length || ""}`], ["events", `Events ${events.length}`]];
  if (round) tabs.push(["request", `Request of round ${round}`]);
  return (
    <section class="page run">
      <Head title={<>{asked && !run.workflow && !run.job ? visible(asked).slice(0, TITLE_SHOWN) : name || "Run"} {run.state && <State run={waiting ? { ...run, waiting } : run} />}</>} {...(beside ? {} : { crumbs: [["/runs", "Runs"]] })}>
        {run.workflow && <a class="button second" href={`/workflows/runs/${runId}`}><Icon name="workflows" /> Show the graph</a>}
        {run.goal && <a class="button second" href={`/goals/${runId}`}>Show the goal</a>}
        {run.job && <a class="button second" href={`/background/${runId}`}>Show the job</a>}
        {!isEnded(run) && run.state && may("agent.v1.AgentService/CancelRun") && (
          <button class="second bad" onClick={() => void attempt(() => pawl.agent.cancelRun({ requestId: requestId(), runId }))}>Stop</button>
        )}
        {asked && view.ended && !beside && !run.workflow && !run.parentRunId && may("agent.v1.ConversationService/ForkConversation") && (
          <button class="second" title="Edit the message in a copy of the conversation" onClick={() => void fork(run.conversationId ?? "", Number(number) - 1, asked)}>Run again with changes</button>
        )}
        <Actions all={runs.actions ?? []} item={run} onDone={() => {}} />
        <Menu name="More actions">
          <button onClick={() => save(view, events)}>Save as JSON</button>
          {view.ended && !run.undo && may("agent.v1.AgentService/UndoRun") && <button onClick={() => setUndoing(true)}>Preview undo</button>}
        </Menu>
      </Head>
      {undoing && <Undo runId={runId} onClose={() => setUndoing(false)} />}
      {!run.state && <Skeleton />}
      <Facts run={run} beside={!!beside} hasChildren={calls.some(({ childRunId }) => childRunId)} />
      <Why run={waiting ? { ...run, waiting } : run} />
      {run.undo && <UndoReport key={run.state} runId={runId} of={run.undo.runId ?? ""} />}
      <Bars timeline={timeline} onCall={() => setTab("calls")} onRound={(number) => (setRound(number), setTab("request"))} />
      <Tabs name="Parts of the run" all={beside ? tabs : [["messages", "Messages"], ...tabs]} open={tab} onOpen={setTab} />
      {tab === "messages" && asked && !run.workflow && !run.job && <div class="mine">{visible(asked)}</div>}
      {tab === "messages" && <RunLog view={view} isExplained />}
      {tab === "calls" && <Calls calls={calls} />}
      {tab === "request" && <Request key={round} runId={runId} round={round} />}
      {tab === "events" && <Rows name="Events" items={events} size={28} height={462} row={(event) => eventRow(event, events[0]?.time)} />}
    </section>
  );
}

const TITLE_SHOWN = 120;
const SAID_SHOWN = 4000;

function Facts({ run, beside, hasChildren }: { run: RunJson; beside: boolean; hasChildren: boolean }): VNode {
  const end = run.endTime ? Date.parse(run.endTime) : clock.value;
  return (
    <dl class="facts">
      <Fact name="Agent" value={run.state && !run.workflow && !run.job && visible(kindOf(run))} />
      <Fact name="Workflow" value={run.workflow && <a href={`/workflows/runs/${run.runId}`}>{run.workflow.name}</a>} />
      <Fact name="Model" value={!run.workflow && !run.job && run.options?.model} />
      <Fact name="Started" value={time(run.createTime)} />
      <Fact name="Duration" value={run.createTime && lasted(Math.max(0, end - Date.parse(run.createTime)) / 1000)} />
      <Fact name="Rounds" value={run.round} />
      <Fact name="Tokens" value={tokens(run)} />
      <Fact name="User" value={run.userId} />
      <Fact name="Conversation" value={!beside && run.conversationId && <a href={`/c/${run.conversationId}`}>Open it</a>} />
      <Fact name="Parent run" value={run.parentRunId && <a href={`/runs/${run.parentRunId}`}>Open it</a>} />
      <Fact name="Child runs" value={hasChildren && <a href={`/runs?parent=${run.runId}`}>Show them</a>} />
    </dl>
  );
}

/** Why a run waits. Its events do not contain this explanation. */
function useWaiting({ runId = "", state, lastSeq }: RunJson): RunJson["waiting"] {
  const waits = state === "RUN_STATE_WAITING" || state === "RUN_STATE_QUEUED" || state === "RUN_STATE_NEEDS_ATTENTION";
  const [waiting] = useRead(async () => (waits ? (await pawl.agent.getRun({ runId })).run?.waiting : undefined), [runId, state, lastSeq]);
  return waiting;
}

const ROW = 32;
const TIMELINE_HEIGHT = 13 * ROW;
const ZOOM = 2;
const AXIS = [0, 0.2, 0.4, 0.6, 0.8];

function Bars({ timeline: { bars }, onCall, onRound }: { timeline: Timeline; onCall: () => void; onRound: (round: number) => void }): VNode | null {
  const [zoom, setZoom] = useState(1);
  const [shift, setShift] = useState(0);
  if (!bars.length) return null;
  const isOpen = bars.some(({ end }) => end === undefined);
  const start = bars.reduce((least, bar) => Math.min(least, bar.start), Infinity);
  const end = bars.reduce((most, bar) => Math.max(most, bar.end ?? bar.start), isOpen ? clock.value : 0);
  const whole = Math.max(1, end - start);
  const shown = whole / zoom;
  const from = start + Math.min(shift, 1 - 1 / zoom) * whole;
  const place = ({ start: first, end: last = end }: { start: number; end?: number }): { left: string; width: string } => {
    const left = Math.min(99.6, Math.max(0, (100 * (first - from)) / shown));
    const right = Math.min(100, Math.max(0, (100 * (last - from)) / shown));
    return { left: `${left.toFixed(2)}%`, width: `${(right - left).toFixed(2)}%` };
  };
  const isVisible = (part: Part | Bar): boolean => part.start <= from + shown && (part.end ?? end) >= from;
  const row = (bar: Bar): VNode => {
    const isCalm = bar.kind === "wait" && !/approv|answer|person|budget|token/i.test(bar.note);
    const parts: Part[] = bar.parts?.length ? bar.parts : [{ kind: bar.kind === "wait" ? "wait" : bar.bad ? "bad" : "run", start: bar.start, ...(bar.end === undefined ? {} : { end: bar.end }) }];
    return (
      <div key={bar.id} role="row" class={`depth${bar.depth}`} data-bar={bar.kind} title={[visible(bar.name), visible(bar.note)].filter(Boolean).join(": ")}>
        <span role="rowheader" class="cut">
          {bar.kind === "call" ? (
            <>
              <button class="plain small" onClick={onCall}>{title(bar.name)} <span class="quiet">{bar.of}</span></button>
              {bar.childRunId && <a href={`/runs/${bar.childRunId}`} aria-label={`Child run of ${visible(bar.name)}`}>↗</a>}
            </>
          ) : bar.kind === "round" ? (
            <button class="plain small" title="Show its request" onClick={() => onRound(Number(bar.id.split(" ")[1]))}>{bar.name}</button>
          ) : visible(bar.name)}
        </span>
        <span role="cell" class="lane">{parts.filter(isVisible).map((part, key) => <i key={key} class={`${bar.kind} ${part.kind} ${isCalm ? "calm" : ""}`} style={place(part)} />)}</span>
        <span role="cell" class={`cut quiet ${bar.bad ? "fault" : ""}`}>{visible(bar.note)}</span>
        <span role="cell" class="took num">{lasted(Math.max(0, (bar.end ?? end) - bar.start) / 1000)}</span>
      </div>
    );
  };
  return (
    <section class="timeline" aria-label="Timeline of the run">
      <div class="row">
        <h2>Timeline: {lasted(whole / 1000)}</h2>
        <span class="space" />
        {zoom > 1 && <input type="range" class="slide" aria-label="Position" min={0} max={1 - 1 / zoom} step={0.01} value={Math.min(shift, 1 - 1 / zoom)} onInput={(event) => setShift(event.currentTarget.valueAsNumber)} />}
        <button class="second small" aria-label="Zoom out" disabled={zoom === 1} onClick={() => setZoom(zoom / ZOOM)}>−</button>
        <button class="second small" aria-label="Zoom in" onClick={() => setZoom(zoom * ZOOM)}>+</button>
      </div>
      <div class="axis quiet" aria-hidden="true">{AXIS.map((part) => <span key={part}>{from + part > start ? lasted((from - start + part * shown) / 1000) : 0}</span>)}</div>
      <Rows name="Timeline" role="table" items={bars} size={ROW} height={TIMELINE_HEIGHT} row={row} />
    </section>
  );
}

const CALLS_SHOWN = 50;

function Calls({ calls }: { calls: CallJson[] }): VNode {
  const [most, setMost] = useState(CALLS_SHOWN);
  if (!calls.length) return <p class="quiet">This run has called no tool.</p>;
  return (
    <>
      {calls.slice(0, most).map((call) => <Call key={call.callId} call={call} />)}
      {calls.length > most && <button class="second" onClick={() => setMost(most + CALLS_SHOWN)}>Show more of {calls.length}</button>}
    </>
  );
}

function Call({ call }: { call: CallJson }): VNode {
  const { toolName = "", state, startTime = "", endTime = "", attempt: tries = 1, result, childRunId } = call;
  const seconds = (Date.parse(endTime) - Date.parse(startTime)) / 1000;
  return (
    <article class="panel io" aria-label={`Call ${visible(toolName)}`}>
      <header class="row">
        <strong title={visible(toolName)}>{title(toolName)}</strong>
        <Badge tone={toneOf(state)}>{word(state)}</Badge>
        {tries > 1 && <Badge tone="warn">attempt {tries}</Badge>}
        <span class="space" />
        <span class="quiet">{childRunId && <><a href={`/runs/${childRunId}`}>Child run</a> · </>}Round {call.round ?? 0}{seconds >= 0 && ` · ${lasted(seconds)}`}</span>
      </header>
      <Decided call={call} />
      <div class="sides">
        <div>
          <h3>Input</h3>
          <Value value={argumentsOf(call)} />
        </div>
        <div>
          <h3>Output</h3>
          {result ? <Value value={read(result.contentJson)} /> : <p class="quiet">{endTime ? "None." : "Not yet."}</p>}
          {result?.note && <p class="quiet">{visible(result.note)}</p>}
        </div>
      </div>
    </article>
  );
}

function Request({ runId, round }: { runId: string; round: number }): VNode {
  const [found, setFound] = useState<GetRoundResponseJson | string>();
  useEffect(() => void pawl.agent.getRound({ runId, round }).then(setFound, (error: Error) => setFound(error.message)), []);
  if (!found) return <Skeleton />;
  if (typeof found === "string") return <p class="fault">{visible(found)}</p>;
  const { matches, sentSha256, model = "", message } = found;
  return (
    <div class="panel">
      <p>{matches ? "This request was sent to" : sentSha256 ? "This request differs from the one that was sent to" : "This request was made for"} {visible(model)}.</p>
      {sentSha256 && <p class="quiet cut">SHA-256 {sentSha256}</p>}
      {found.requestOmittedBytes ? <p class="quiet">It is too large to show.</p> : <Sent request={read(found.requestJson)} />}
      {message && <><h3>Answer</h3><Said role="assistant" content={message.text} calls={found.calls?.map((call) => `${call.toolName} ${JSON.stringify(argumentsOf(call))}`)} /></>}
    </div>
  );
}

/** The messages and tools of a request, and all of it as JSON. */
function Sent({ request }: { request: any }): VNode {
  const { messages = [], tools = [] } = request ?? {};
  return (
    <>
      {messages.map(({ role, content, tool_calls: calls }: any, key: number) => (
        <Said key={key} role={role} content={typeof content === "string" ? content : content && JSON.stringify(content)} calls={calls?.map(({ function: { name, arguments: args } }: any) => `${name} ${args}`)} />
      ))}
      {!!tools.length && <Said role="tools" content={tools.map((tool: any) => tool.function?.name).join(", ")} />}
      <details class="json"><summary>As JSON</summary><Json value={request} /></details>
    </>
  );
}

function Said({ role, content = "", calls = [] }: { role: string; content?: string | undefined; calls?: string[] | undefined }): VNode {
  return (
    <div class="said">
      <strong>{role}</strong>
      <div>{content && <p class="prose" tabIndex={0}>{visible(content.slice(0, SAID_SHOWN))}{content.length > SAID_SHOWN && " …"}</p>}{calls.map((call, key) => <code key={key}>{visible(call)}</code>)}</div>
    </div>
  );
}

function said(event: RunEventJson): string {
  const { runChanged, roundStarted, roundEnded, outputDelta, messageAdded, callChanged, toolProgress } = event;
  if (runChanged) return [runChanged.fromState, runChanged.run?.state].filter(Boolean).map(word).join(" → ");
  if (roundStarted) return `round ${roundStarted.round}, ${roundStarted.model}`;
  if (roundEnded) return `round ${roundEnded.round}, ${tokens(roundEnded)} tokens`;
  if (outputDelta) return [outputDelta.reasoning, outputDelta.text, ...(outputDelta.calls ?? []).map(({ toolName, argumentsText }) => `${toolName ?? ""}${argumentsText ?? ""}`)].filter(Boolean).join(" ");
  if (messageAdded) return `${word((messageAdded.message?.role ?? "").replace("ROLE_", ""))}: ${messageAdded.message?.text || "calls tools"}`;
  if (callChanged) return `${callChanged.call?.toolName}: ${word(callChanged.call?.state)}`;
  if (toolProgress) return toolProgress.message ?? "";
  const { seq: _s, type: _t, time: _at, storeId: _i, conversationId: _c, runId: _r, eventId: _e, attempt: _a, ...rest } = event;
  return JSON.stringify(rest);
}

function eventRow(event: RunEventJson, first = ""): VNode {
  return (
    <div key={event.seq} class="event" title={moment(event.time)}>
      <span class="quiet num">{event.seq}</span> <strong>{event.type}</strong> <span class="quiet num">+{lasted(Math.max(0, Date.parse(event.time ?? "") - Date.parse(first)) / 1000)}</span> <span class="quiet">{visible(said(event).slice(0, 400))}</span>
    </div>
  );
}

function save(view: RunView, events: RunEventJson[]): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify({ ...view, events }, null, 2)], { type: "application/json" }));
  link.download = `${view.run.runId}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}
