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

export const WIDTH = 212;
const HEIGHT = 60;
/** Height of a branch in the box of its parallel node. */
export const BRANCH = 36;
const GAP = { x: 76, y: 16 };
/** A line past a column takes this height there. */
const PASS = 20;
const PASSES_MAX = 2000;
/** Nodes in a column, if there are no edges: the items of a map. */
const COLUMN = 10;

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

/** Computes the layout of nodes, given in topological order with the number of their branches. */
export function layOut(nodes: { path: string; branches: number }[], edges: Edge[]): Layout {
  const columns = levels(nodes, edges);
  const boxes: Record<string, Box> = {};
  for (const { path, branches } of nodes) boxes[path] = { x: (columns[path] ?? 0) * (WIDTH + GAP.x), y: 0, height: HEIGHT + branches * BRANCH };
  // The boxes that a line connects. In the columns that it passes, it has a box of its own.
  const chains = edges.map(({ from, to }) => [from, to]);
  const before: Record<string, string[]> = {};
  const rows: string[][] = [];
  for (const { path } of nodes) (rows[columns[path] ?? 0] ??= []).push(path);
  let passes = 0;
  edges.forEach(({ from, to }, index) => {
    const chain = [from];
    for (let column = columns[from]! + 1; column < columns[to]! && passes < PASSES_MAX; column++) {
      const pass = `${index} ${passes++}`;
      boxes[pass] = { x: column * (WIDTH + GAP.x), y: 0, height: PASS };
      rows[column]!.push(pass);
      chain.push(pass);
    }
    chains[index] = [...chain, to];
    chain.forEach((each, at) => (before[chains[index]![at + 1]!] ??= []).push(each));
  });
  const height = stack(rows, boxes, before);
  return {
    width: rows.length * (WIDTH + GAP.x) - GAP.x,
    height,
    boxes: Object.fromEntries(nodes.map(({ path }) => [path, boxes[path]!])),
    lines: edges.map(({ label }, index) => line(chains[index]!.map((each) => boxes[each]!), label)),
  };
}

/** Returns the column of each node: one after the last node before it. */
function levels(nodes: { path: string }[], edges: Edge[]): Record<string, number> {
  if (!edges.length) return Object.fromEntries(nodes.map(({ path }, index) => [path, nodes.length > COLUMN ? Math.floor(index / COLUMN) : 0]));
  const found: Record<string, number> = {};
  for (const { path } of nodes) found[path] = Math.max(0, ...edges.filter(({ to }) => to === path).map(({ from }) => (found[from] ?? 0) + 1));
  return found;
}

/** Sets the vertical positions, near the boxes before; returns the height of the graph. */
function stack(rows: string[][], boxes: Record<string, Box>, before: Record<string, string[]>): number {
  const middle = (name: string): number => boxes[name]!.y + boxes[name]!.height / 2;
  const wanted = (name: string): number => {
    const sources = before[name] ?? [];
    return sources.reduce((sum, source) => sum + middle(source), 0) / Math.max(1, sources.length);
  };
  let height = 0;
  for (const row of rows) {
    let free = 0;
    for (const [name, at] of row.map((name) => [name, wanted(name)] as const).sort(([, one], [, other]) => one - other)) {
      const box = boxes[name]!;
      box.y = Math.round(Math.max(free, at - box.height / 2));
      free = box.y + box.height + GAP.y;
      height = Math.max(height, free - GAP.y);
    }
  }
  return height;
}

function line(chain: Box[], label: string): Layout["lines"][number] {
  const middle = ({ y, height }: Box): number => y + height / 2;
  const bends = chain.slice(1).map((box, index) => {
    const from = chain[index]!;
    const [start, middleX] = [from.x + WIDTH, GAP.x / 2];
    const passed = index < chain.length - 2 ? ` H ${box.x + WIDTH}` : "";
    return `C ${start + middleX} ${middle(from)}, ${box.x - middleX} ${middle(box)}, ${box.x} ${middle(box)}${passed}`;
  });
  const [first, last] = [chain[0]!, chain.at(-1)!];
  return { path: `M ${first.x + WIDTH} ${middle(first)} ${bends.join(" ")}`, x: last.x - 10, y: middle(last) - 6, label };
}
