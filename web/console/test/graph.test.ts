import { expect, test } from "vitest";

import { edgesOf, graphOf, layOut } from "../src/graph";

const EDGES = [
  { source: "fetch", target: "big", kind: "after" },
  { source: "big", target: "both", kind: "then" },
  { source: "both", target: "answer", kind: "go_to" },
  { source: "fetch", target: "answer", kind: "reference" },
];

const NODES = ["fetch", "big", "both", "answer"].map((path) => ({ path, branches: path === "both" ? 2 : 0 }));

test("a node is right of all nodes before it, and a line passes the boxes between", () => {
  const { boxes, lines, width, height } = layOut(NODES, edgesOf(EDGES));
  const xs = NODES.map(({ path }) => boxes[path]!.x);
  expect([...xs].sort((one, other) => one - other)).toEqual(xs);
  expect(new Set(xs).size).toBe(4);
  expect(lines[3]!.path.match(/L/g)).toHaveLength(2);
  expect(lines.map(({ label }) => label)).toEqual(["", "then", "on error", ""]);
  expect(width).toBeGreaterThan(Math.max(...xs));
  for (const box of Object.values(boxes)) expect(box.y + box.height).toBeLessThanOrEqual(height);
});

test("in a narrow box, a node is below all nodes before it", () => {
  const { boxes, width } = layOut(NODES, edgesOf(EDGES), true);
  const all = NODES.map(({ path }) => boxes[path]!);
  all.slice(1).forEach((box, index) => expect(box.y).toBeGreaterThanOrEqual(all[index]!.y + all[index]!.height));
  for (const box of all) expect(box.x + 212).toBeLessThanOrEqual(width);
});

test("the boxes of a column do not overlap", () => {
  const nodes = ["start", ...Array.from({ length: 20 }, (_, index) => `n${index}`)].map((path) => ({ path, branches: path.length }));
  const edges = nodes.slice(1).map(({ path }) => ({ from: "start", to: path, label: "" }));
  const column = nodes.slice(1).map(({ path }) => layOut(nodes, edges).boxes[path]!).sort((one, other) => one.y - other.y);
  column.slice(1).forEach((box, index) => expect(box.y).toBeGreaterThanOrEqual(column[index]!.y + column[index]!.height));
});

test("nodes without edges fill several columns", () => {
  const nodes = Array.from({ length: 50 }, (_, index) => ({ path: `each[${index}]`, branches: 0 }));
  expect(new Set(Object.values(layOut(nodes, []).boxes).map(({ x }) => x)).size).toBe(5);
});

test("a flowchart becomes nodes with branches, and labelled edges", () => {
  const chart = `flowchart TD
  n0["end<br/>tool calculate"]
  n1{"decided<br/>condition"}
  subgraph n2 ["both<br/>parallel: all"]
    n2_0[/"a<br/>human"/]
  end
  n0 --> n1
  n1 -->|then| n2
  n0 -.->|on error| n2
`;
  const { nodes, edges } = graphOf(chart);
  expect(nodes.map(({ path, kind }) => [path, kind])).toEqual([["end", "tool calculate"], ["decided", "condition"], ["both", "parallel: all"]]);
  expect(nodes[2]!.nodes).toEqual([{ path: "both.a", kind: "human", nodes: [] }]);
  expect(edges.map(({ from, to, label }) => [from, to, label])).toEqual([["end", "decided", ""], ["decided", "both", "then"], ["end", "both", "on error"]]);
});
