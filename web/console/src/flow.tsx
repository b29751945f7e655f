/** A workflow as a graph: its nodes in columns and the lines between them, with the states of a run if there is one. */

import type { NodeExecutionJson } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { Icon, type IconName } from "./design/icons";
import { BRANCH, type Box, type Edge, type Layout, layOut, WIDTH } from "./graph";
import { clock, lasted, word } from "./state";

/** A wide graph shrinks until its texts would be too small, then scrolls. In a narrow box, it goes down. */
const SCALE_MIN = 0.75;
const NARROW = 640;
const ICONS: Record<string, IconName> = { tool: "tools", agent: "agents", human: "chat", condition: "help", map: "runs", parallel: "menu", output: "check", wait: "background", workflow: "workflows" };
const SKETCH = { scale: 0.12, width: 176, height: 36 };

/** A node with the branches below it. */
export const flat = (node: NodeExecutionJson): NodeExecutionJson[] => [node, ...(node.nodes ?? []).flatMap(flat)];

function useLayout(nodes: NodeExecutionJson[], edges: Edge[], isDown = false): Layout {
  const sizes = nodes.map((node) => ({ path: node.path ?? "", branches: flat(node).length - 1 }));
  return useMemo(() => layOut(sizes, edges, isDown), [JSON.stringify(sizes), JSON.stringify(edges), isDown]);
}

interface Props {
  nodes: NodeExecutionJson[];
  edges: Edge[];
  chosen?: string | undefined;
  onChoose?: (path: string) => void;
}

export function Graph({ nodes, edges, ...choice }: Props): VNode {
  const box = useRef<HTMLDivElement>(null);
  const [room, setRoom] = useState(0);
  const isDown = room > 0 && room < NARROW && edges.length > 0;
  const { width, height, boxes, lines } = useLayout(nodes, edges, isDown);
  const scale = room ? Math.max(SCALE_MIN, Math.min(1, (room - 8) / width)) : 1;
  useEffect(() => {
    const watched = new ResizeObserver(() => setRoom(box.current?.clientWidth ?? 0));
    if (box.current) watched.observe(box.current);
    return () => watched.disconnect();
  }, []);
  return (
    <div ref={box} class={`graph ${isDown ? "down" : ""}`} tabIndex={0} role="region" aria-label="Nodes">
      <div style={{ width: `${width}px`, height: `${height}px`, zoom: scale }}>
        <svg width={width} height={height} aria-hidden="true">
          <defs>
            <marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" /></marker>
          </defs>
          {lines.map(({ path, x, y, label }, key) => (
            <g key={key}>
              <path d={path} class={label === "on error" ? "dashed" : ""} marker-end="url(#arrow)" />
              <text x={x} y={y}>{label}</text>
            </g>
          ))}
        </svg>
        {nodes.map((node) => <NodeBox key={node.path} node={node} box={boxes[node.path ?? ""]!} {...choice} />)}
      </div>
    </div>
  );
}

function NodeBox({ node, box, chosen, onChoose }: { node: NodeExecutionJson; box: Box } & Omit<Props, "nodes" | "edges">): VNode {
  const [, ...branches] = flat(node);
  const Part = onChoose ? "button" : "div";
  const part = (each: NodeExecutionJson): VNode => (
    <Part
      key={each.path}
      class={`step ${each.state === "NODE_STATE_WAITING" ? "wait" : ""}`}
      {...(onChoose ? { type: "button", "data-item": true, "aria-pressed": each.path === chosen, onClick: () => onChoose(each.path ?? "") } : {})}
      data-node={each.path}
      data-state={word(each.state)}
      style={each === node ? {} : { height: `${BRANCH}px` }}
    >
      <strong>{each === node && <Icon name={ICONS[/^\w+/.exec(each.kind ?? "")?.[0] ?? ""] ?? "more"} />}{each === node ? each.path : each.path?.slice((node.path?.length ?? 0) + 1)}</strong>
      {each.state && <span class={`quiet state ${each.state}`}>{word(each.state)}</span>}
      {(each === node || !each.state) && <small class="quiet">{[each.kind, took(each), tries(each), counts(each), each.reused && "reused"].filter(Boolean).join(" · ")}</small>}
    </Part>
  );
  return (
    <div class={`node ${node.state ?? ""}`} style={{ left: `${box.x}px`, top: `${box.y}px`, width: `${WIDTH}px`, height: `${box.height}px` }}>
      {part(node)}
      {branches.map(part)}
    </div>
  );
}

/** The shape of a workflow, small enough for a list. */
export function Sketch({ nodes, edges }: Props): VNode {
  const { width, height, boxes, lines } = useLayout(nodes, edges);
  const scale = Math.min(SKETCH.scale, SKETCH.width / width, SKETCH.height / height);
  return (
    <svg class="sketch" viewBox={`-4 -4 ${width + 8} ${height + 8}`} width={(width + 8) * scale} height={(height + 8) * scale} aria-hidden="true">
      {lines.map(({ path }, key) => <path key={key} d={path} />)}
      {nodes.map(({ path = "", state }) => <rect key={path} {...boxes[path]!} width={WIDTH} rx={12} class={state ?? ""} />)}
    </svg>
  );
}

export function took({ startTime, endTime }: { startTime?: string; endTime?: string }): string {
  if (!startTime) return "";
  return lasted(Math.max(0, (endTime ? Date.parse(endTime) : clock.value) - Date.parse(startTime)) / 1000);
}

export function tries({ attempt: number = 0, iteration = 0 }: NodeExecutionJson): string {
  return [iteration > 1 && `iteration ${iteration}`, number > 1 && `attempt ${number}`].filter(Boolean).join(", ");
}

export function counts({ map }: NodeExecutionJson): string {
  return map ? `${(map.succeeded ?? 0) + (map.failed ?? 0)} of ${map.items ?? 0}${map.failed ? `, ${map.failed} failed` : ""}` : "";
}
