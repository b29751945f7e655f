/** Layout of a workflow: nodes in columns by dependency, and the lines between them. */

import type { NodeExecutionJson, WorkflowEdgeJson } from "@pawl/client";

export interface Edge {
  from: string;
  to: string;
  label: string;
}

const LABELS: Record<string, string> = { then: "then", else: "else", go_to: "on error" };

export interface Box {
  x: number;
  y: number;
  height: number;
}

export interface Layout {
  width: number;
  height: number;
  boxes: Record<string, Box>;
  lines: { path: string; x: number; y: number; label: string }[];
}

/** The position of a node, or of a line that passes a level: its level, and its start and size across. */
interface Slot {
  level: number;
  start: number;
  size: number;
}

export const WIDTH = 212;
const HEIGHT = 60;
/** Height of a branch in the box of its parallel node. */
export const BRANCH = 42;
const GAP = { right: 76, down: 44, across: 16 };
/** A line past a level takes this room there. */
const PASS = 20;
const PASSES_MAX = 2000;
/** Nodes in a level, if there are no edges: the items of a map. */
const LEVEL = 10;

export function edgesOf(edges: WorkflowEdgeJson[]): Edge[] {
  return edges.map(({ source = "", target = "", kind = "" }) => ({ from: source, to: target, label: LABELS[kind] ?? "" }));
}

/** Returns the nodes and edges of the flowchart that GetWorkflow draws. Nodes have no state. */
export function graphOf(mermaid = ""): { nodes: NodeExecutionJson[]; edges: Edge[] } {
  const found: Record<string, NodeExecutionJson> = {};
  const [nodes, edges]: [NodeExecutionJson[], Edge[]] = [[], []];
  for (const line of mermaid.split("\n")) {
    const [, id = "", name = "", kind = ""] = /^ +(?:subgraph )?(n[\d_]+)\W*"(.+?)<br\/>(.*)"/.exec(line) ?? [];
    const [, from = "", label = "", to = ""] = /^ +(n\d+) [-.>]+(?:\|(.+)\|)? (n\d+)$/.exec(line) ?? [];
    if (id) {
      const parent = found[id.replace(/_\d+$/, "")];
      found[id] = { path: parent ? `${parent.path}.${name}` : name, kind, nodes: [] };
      (parent?.nodes ?? nodes).push(found[id]);
    } else if (from) edges.push({ from: found[from]?.path ?? "", to: found[to]?.path ?? "", label });
  }
  return { nodes, edges };
}

/** Computes the layout of nodes, given in topological order with the number of their branches: to the right or down. */
export function layOut(nodes: { path: string; branches: number }[], edges: Edge[], isDown = false): Layout {
  const levels = levelsOf(nodes, edges);
  const heights = Object.fromEntries(nodes.map(({ path, branches }) => [path, HEIGHT + branches * BRANCH]));
  const slots: Record<string, Slot> = {};
  const rows: string[][] = [];
  for (const { path } of nodes) {
    const level = levels[path] ?? 0;
    slots[path] = { level, start: 0, size: isDown ? WIDTH : heights[path]! };
    (rows[level] ??= []).push(path);
  }
  // The slots that a line connects. In the levels that it passes, it has a slot of its own.
  const before: Record<string, string[]> = {};
  let passes = 0;
  const chains = edges.map(({ from, to }, index) => {
    const chain = [from];
    for (let level = levels[from]! + 1; level < levels[to]! && passes < PASSES_MAX; level++) {
      const pass = `${index} ${passes++}`;
      slots[pass] = { level, start: 0, size: PASS };
      rows[level]!.push(pass);
      chain.push(pass);
    }
    chain.push(to);
    chain.slice(1).forEach((each, at) => (before[each] ??= []).push(chain[at]!));
    return chain;
  });
  const across = stack(rows, slots, before);
  const gap = isDown ? GAP.down : GAP.right;
  const thick = rows.map((row) => (isDown ? Math.max(...row.map((each) => heights[each] ?? 0)) : WIDTH));
  const starts = thick.map((_, level) => thick.slice(0, level).reduce((sum, each) => sum + each + gap, 0));
  const along = starts.at(-1)! + thick.at(-1)!;
  const at = (far: number, side: number): string => (isDown ? `${side} ${far}` : `${far} ${side}`);
  const line = (chain: string[], label: string): Layout["lines"][number] => {
    const ends = chain.map((each) => {
      const { level, start, size } = slots[each]!;
      return { from: starts[level]!, to: starts[level]! + (isDown && heights[each] ? heights[each] : thick[level]!), middle: start + size / 2 };
    });
    const bends = ends.slice(1).map(({ from, to, middle }, index) => {
      const last = ends[index]!;
      return `C ${at(last.to + gap / 2, last.middle)}, ${at(from - gap / 2, middle)}, ${at(from, middle)}${index < ends.length - 2 ? ` L ${at(to, middle)}` : ""}`;
    });
    const [first, last] = [ends[0]!, ends.at(-1)!];
    const [far, side] = [last.from - 10, last.middle + (isDown ? 8 : -6)];
    return { path: `M ${at(first.to, first.middle)} ${bends.join(" ")}`, label, ...(isDown ? { x: side, y: far } : { x: far, y: side }) };
  };
  return {
    ...(isDown ? { width: across, height: along } : { width: along, height: across }),
    boxes: Object.fromEntries(nodes.map(({ path }) => {
      const { level, start } = slots[path]!;
      return [path, { ...(isDown ? { x: start, y: starts[level]! } : { x: starts[level]!, y: start }), height: heights[path]! }];
    })),
    lines: edges.map(({ label }, index) => line(chains[index]!, label)),
  };
}

/** Returns the level of each node: one after the last node before it. */
function levelsOf(nodes: { path: string }[], edges: Edge[]): Record<string, number> {
  if (!edges.length) return Object.fromEntries(nodes.map(({ path }, index) => [path, nodes.length > LEVEL ? Math.floor(index / LEVEL) : 0]));
  const found: Record<string, number> = {};
  for (const { path } of nodes) found[path] = Math.max(0, ...edges.filter(({ to }) => to === path).map(({ from }) => (found[from] ?? 0) + 1));
  return found;
}

/** Sets the positions across, near the slots before; returns their extent. */
function stack(rows: string[][], slots: Record<string, Slot>, before: Record<string, string[]>): number {
  const middle = (name: string): number => slots[name]!.start + slots[name]!.size / 2;
  const wanted = (name: string): number => {
    const sources = before[name] ?? [];
    return sources.reduce((sum, source) => sum + middle(source), 0) / Math.max(1, sources.length);
  };
  let extent = 0;
  for (const row of rows) {
    let free = 0;
    for (const [name, at] of row.map((name) => [name, wanted(name)] as const).sort(([, one], [, other]) => one - other)) {
      const slot = slots[name]!;
      slot.start = Math.round(Math.max(free, at - slot.size / 2));
      free = slot.start + slot.size + GAP.across;
      extent = Math.max(extent, free - GAP.across);
    }
  }
  return extent;
}
