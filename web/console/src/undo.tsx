/** Undoing the effects of a run: preview and report. */

import { type CallUndoJson, requestId } from "@pawl/client";
import type { VNode } from "preact";

import { Skeleton } from "./design/parts";
import { type Column, Table } from "./design/table";
import { Below, useRead } from "./resource";
import { attempt, go, pawl, word } from "./state";
import { visible } from "./visible";

const UNDO: Column<CallUndoJson>[] = [
  { name: "Call", of: ({ toolName }) => visible(toolName || "earlier calls of the series") },
  { name: "Undo", size: 130, of: ({ state }) => word(state?.replace("UNDO_STATE_", "")) },
  { name: "Effect", of: ({ summary, reason }) => visible([summary, reason].filter(Boolean).join(": ")) },
  { name: "Undo run", size: 110, priority: 2, of: ({ undoRunId: id }) => id && <a href={`/runs/${id}`}>{id.slice(-8)}</a> },
];

export function Undo({ runId, onClose }: { runId: string; onClose: () => void }): VNode {
  const [calls] = useRead(async () => (await pawl.agent.previewUndo({ runId })).calls ?? []);
  const does = calls?.some(({ state }) => state === "UNDO_STATE_TO_UNDO");
  const undo = async (): Promise<void> => go(`/runs/${(await pawl.agent.undoRun({ requestId: requestId(), runId })).run?.runId}`);
  return (
    <div class="panel">
      <h2>Undo</h2>
      {!!calls?.length && <Table name="Undo preview" columns={UNDO} items={calls} />}
      {!calls && <Skeleton lines={2} />}
      {calls && !does && <p class="quiet">There is nothing to undo.</p>}
      <p class="buttons">
        {does && <button class="bad" onClick={() => void attempt(undo)}>Undo now</button>}
        <button class="second" onClick={onClose}>Cancel</button>
      </p>
    </div>
  );
}

export function UndoReport({ runId, of }: { runId: string; of: string }): VNode {
  return (
    <div class="panel">
      <p>This run undoes <a href={`/runs/${of}`}>another run</a>.</p>
      <Below name="Undo report" method="agent.v1.AgentService/GetUndoReport" load={async () => (await pawl.agent.getUndoReport({ runId })).calls} columns={UNDO} />
    </div>
  );
}
