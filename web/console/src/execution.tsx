/** A workflow run as a graph of its nodes, live. */

import { type CallJson, decode, type GetExecutionResponseJson, isEnded, type MapChunkExecutionJson, type NodeAttemptJson, type NodeExecutionJson, requestId, type RerunFromResponseJson } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { type Action, Actions } from "./actions";
import { Value } from "./approval";
import { CallCard } from "./cards";
import { time } from "./format";
import { counts, flat, Graph, took, tries } from "./flow";
import { edgesOf } from "./graph";
import { parse, parsed } from "./json";
import { Badge, Fact, Head, Missing, Skeleton, toneOf } from "./design/parts";
import { type Column, Table } from "./design/table";
import { paced, useRead } from "./resource";
import { nameOfRun, State, tokens, Why } from "./runs";
import { attempt, clock, forPeople, go, isAbsent, lasted, may, pawl, query, word } from "./state";
import { visible } from "./visible";

/** Running maps whose items are followed. */
const WATCHED_MAX = 8;

/** Reads a run now and after its events, at most once a second. */
function useExecution(runId: string): [GetExecutionResponseJson | undefined, string] {
  const [execution, setExecution] = useState<GetExecutionResponseJson>();
  const [fault, setFault] = useState("");
  const again = useRef(() => {});
  useEffect(() => {
    let isLeft = false;
    const read = paced(async () => {
      if (isLeft) return;
      const found = await attempt(
        () => pawl.workflows.getExecution({ runId }).catch((error: unknown) => (isAbsent(error) ? setFault(String((error as Error).message)) : Promise.reject(error))),
        true,
      );
      if (found && !isLeft) setExecution(found);
    });
    again.current = () => void read();
    again.current();
    const leave = pawl.watchRun(runId, again.current, (error) => setFault(error.message));
    return () => {
      isLeft = true;
      leave();
    };
  }, [runId]);
  // The items of a map end in child runs, whose events its own run does not have.
  const chunks = (execution?.nodes ?? []).flatMap(flat).flatMap(({ map, endTime, childRunId }) => (map && !endTime && childRunId ? [childRunId] : []));
  useEffect(() => {
    const leaves = chunks.slice(0, WATCHED_MAX).map((id) => pawl.watchRun(id, () => again.current()));
    return () => leaves.forEach((leave) => leave());
  }, [chunks.join()]);
  return [execution, fault];
}

export function ExecutionPage({ runId }: { runId: string }): VNode {
  const [execution, fault] = useExecution(runId);
  const { run = {}, nodes = [], paused, failedNode } = execution ?? {};
  const all = nodes.flatMap(flat);
  const chosen = all.find(({ path }) => path === query.value.get("node"));
  const runs = new Set([runId, ...all.map(({ childRunId }) => childRunId)]);
  const pending = forPeople.value.filter((call) => runs.has(call.runId));
  const { name = "", version, rerunOfRunId, chunk } = run.workflow ?? {};
  if (fault)
    return <Missing icon="workflows" title="This run cannot be shown" fault={fault} to="/workflows" name="workflows" />;
  if (!execution) return <section class="page wide"><Head title="Workflow run" crumbs={[["/workflows", "Workflows"]]} /><Skeleton /></section>;
  return (
    <section class="page wide run">
      <Head
        crumbs={[["/workflows", "Workflows"], [`/workflows/${name}`, name]]}
        title={<>{nameOfRun(run)} <State run={run} />{paused && !isEnded(run) && <> <Badge tone="warn">paused</Badge></>}</>}
      >
        <Actions all={ACTIONS} item={execution} onDone={() => {}} />
      </Head>
      <dl class="facts">
        <Fact name="Run" value={<a href={`/runs/${runId}`}>Show the timeline</a>} />
        <Fact name="Version" value={version} />
        <Fact name="Started" value={time(run.createTime)} />
        <Fact name="Duration" value={took({ startTime: run.createTime ?? "", ...(run.endTime ? { endTime: run.endTime } : {}) })} />
        <Fact name="Tokens" value={tokens(run)} />
        <Fact name="User" value={run.userId} />
        <Fact name="Rerun of" value={rerunOfRunId && <a href={`/workflows/runs/${rerunOfRunId}`}>Open it</a>} />
        <Fact name="Parent run" value={run.parentRunId && <a href={`/workflows/runs/${run.parentRunId}`}>Open it</a>} />
      </dl>
      <Why run={run} at={failedNode} />
      {pending.map((call) => <CallCard key={call.callId} call={call} />)}
      <Graph nodes={nodes} edges={edgesOf(execution.edges ?? [])} chosen={chosen?.path} onChoose={(to) => go(`/workflows/runs/${runId}${to === chosen?.path ? "" : `?node=${encodeURIComponent(to)}`}`)} />
      {chosen && <Node key={chosen.path} runId={runId} tree={chosen} rerun={isEnded(run) && !chunk} />}
      {run.outputText && <Labelled name="Output" value={parsed(run.outputText)} />}
    </section>
  );
}

function Labelled({ name, value }: { name: string; value: unknown }): VNode {
  return <><h2>{name}</h2><Value value={value} /></>;
}

const runIdOf = ({ run }: GetExecutionResponseJson): { requestId: string; runId: string } => ({ requestId: requestId(), runId: run?.runId ?? "" });
const ACTIONS: Action<GetExecutionResponseJson>[] = [
  { name: "Pause", method: "agent.v1.WorkflowService/PauseExecution", when: ({ run = {}, paused }) => !isEnded(run) && !paused, run: (each) => pawl.workflows.pauseExecution(runIdOf(each)) },
  { name: "Resume", method: "agent.v1.WorkflowService/ResumeExecution", when: ({ run = {}, paused }) => !isEnded(run) && !!paused, run: (each) => pawl.workflows.resumeExecution(runIdOf(each)) },
  { name: "Stop", method: "agent.v1.AgentService/CancelRun", when: ({ run = {} }) => !isEnded(run), bad: true, run: (each) => pawl.agent.cancelRun(runIdOf(each)) },
];

const nodeState = ({ state }: { state?: string }): VNode => <Badge tone={toneOf(state)}>{word(state)}</Badge>;

const ATTEMPTS: Column<NodeAttemptJson>[] = [
  { name: "Attempt", size: 80, of: ({ iteration = 1, attempt: number = 1 }) => (iteration > 1 ? `${iteration}.${number}` : number) },
  { name: "State", size: 120, of: nodeState },
  { name: "Started", of: ({ startTime }) => time(startTime) },
  { name: "Took", size: 90, priority: 2, of: took },
  { name: "Run", size: 110, of: ({ childRunId: id }) => id && <a href={`/runs/${id}`}>Open</a> },
  { name: "Error", priority: 2, of: ({ error }) => [error?.reason, error?.message].filter(Boolean).join(": ") },
];

const CHUNKS: Column<MapChunkExecutionJson>[] = [
  { name: "Items", of: ({ firstIndex = 0, items = 0, runId }) => <a href={`/workflows/runs/${runId}`}>{`${firstIndex} to ${firstIndex + items - 1}`}</a> },
  { name: "State", of: nodeState },
];

/** A node with its input, output and attempts, read again when its state in the tree changes. */
function Node({ runId, tree, rerun }: { runId: string; tree: NodeExecutionJson; rerun: boolean }): VNode {
  const place = useRef<HTMLElement>(null);
  const { path = "", state, attempt: number, iteration, map, childRunId } = tree;
  const [read] = useRead(async () => (await pawl.workflows.getExecution({ runId, node: path })).nodes?.[0], [JSON.stringify([state, number, iteration, map, childRunId])]);
  useEffect(() => place.current?.scrollIntoView({ block: "nearest" }), [!!read]);
  const node = { ...read, ...tree, ...(read?.inputJson ? { inputJson: read.inputJson } : {}), ...(read?.outputJson ? { outputJson: read.outputJson } : {}) };
  const chunks = read?.map?.chunks ?? [];
  return (
    <article ref={place} class="panel" aria-label={`Node ${path}`}>
      <h2>{path} {nodeState(node)}</h2>
      <dl class="facts">
        <Fact name="Kind" value={node.kind} />
        <Fact name="Started" value={time(node.startTime)} />
        <Fact name="Took" value={took(node)} />
        <Fact name="Attempt" value={tries(node)} />
        <Fact name="Items" value={counts(node)} />
        <Fact name="Reused" value={node.reused && "from an earlier run"} />
        <Fact name="Run" value={childRunId && !map && <a href={`${node.kind === "workflow" ? "/workflows" : ""}/runs/${childRunId}`}>Open it</a>} />
      </dl>
      {node.error && <p class="fault">{node.error.reason}: {visible(node.error.message ?? "")}</p>}
      {rerun && may("agent.v1.WorkflowService/RerunFrom") && <Rerun runId={runId} path={path} />}
      {node.inputJson && <Labelled name="Input" value={decode(node.inputJson, parse)} />}
      {node.outputJson && <Labelled name="Output" value={decode(node.outputJson, parse)} />}
      {!node.outputJson && Number(node.outputOmittedBytes ?? 0) > 0 && <p class="quiet">The output has {node.outputOmittedBytes} bytes.</p>}
      {(read?.attempts?.length ?? 0) > 1 && <Table name="Attempts" columns={ATTEMPTS} items={read?.attempts ?? []} />}
      {!!chunks.length && <Table name="Items" columns={CHUNKS} items={chunks} />}
    </article>
  );
}

const EFFECTS: Column<CallJson>[] = [
  { name: "Call", of: ({ toolName }) => visible(toolName ?? "") },
  { name: "State", of: ({ state }) => word(state) },
  { name: "When", of: ({ endTime, createTime }) => time(endTime ?? createTime) },
  { name: "Run", of: ({ runId: id }) => id && <a href={`/runs/${id}`}>Open</a> },
];

/** Shows which nodes a rerun repeats, and starts it. */
function Rerun({ runId, path }: { runId: string; path: string }): VNode {
  const [plan, setPlan] = useState<RerunFromResponseJson>();
  if (!plan)
    return (
      <p class="buttons">
        <button class="second" onClick={() => void attempt(async () => setPlan(await pawl.workflows.rerunFrom({ runId, node: path, validateOnly: true })))}>Rerun from this node</button>
      </p>
    );
  const { rerunNodes = [], repeatedEffects = [] } = plan;
  const start = async (): Promise<void> => {
    const { run } = await pawl.workflows.rerunFrom({ requestId: requestId(), runId, node: path });
    if (run?.runId) go(`/workflows/runs/${run.runId}`);
  };
  return (
    <div class="panel">
      <p>These nodes run again in a new run: {rerunNodes.join(", ")}.</p>
      {repeatedEffects.length ? (
        <>
          <p>These effects can happen again:</p>
          <Table name="Repeated effects" columns={EFFECTS} items={repeatedEffects} />
        </>
      ) : <p class="quiet">No effect happens again.</p>}
      <p class="buttons">
        <button onClick={() => void attempt(start)}>Rerun now</button>
        <button class="second" onClick={() => setPlan(undefined)}>Cancel</button>
      </p>
    </div>
  );
}
