import { expect, test } from "vitest";

import { edgesOf, layOut } from "../src/graph";

const CHART = `flowchart TD
  n0["fetch<br/>tool get_ticket<br/>succeeded"]
  class n0 SUCCEEDED
  n1{"big<br/>condition"}
  subgraph n2 ["both<br/>parallel: all"]
    n2_0["a<br/>tool get_ticket"]
    n2_1[/"b<br/>human"/]
  end
  n3(["answer<br/>output"])
  n0 --> n1
  n1 -->|then| n2
  n2 -.->|on error| n3
  n0 --> n3
  classDef SUCCEEDED fill:#dcfce7,stroke:#16a34a,color:#14532d
`;

const NODES = ["fetch", "big", "both", "answer"].map((path) => ({ path, branches: path === "both" ? 2 : 0 }));

test("the edges of a flowchart are read, without its branches", () => {
  expect(edgesOf(CHART)).toEqual([
    { from: "fetch", to: "big", label: "" },
    { from: "big", to: "both", label: "then" },
    { from: "both", to: "answer", label: "on error" },
    { from: "fetch", to: "answer", label: "" },
  ]);
  expect(edgesOf("")).toEqual([]);
});

test("a node is right of all nodes before it, and a line passes the boxes between", () => {
  const { boxes, lines, width, height } = layOut(NODES, edgesOf(CHART));
  const xs = NODES.map(({ path }) => boxes[path]!.x);
  expect([...xs].sort((one, other) => one - other)).toEqual(xs);
  expect(new Set(xs).size).toBe(4);
  expect(lines[3]!.path.match(/H/g)).toHaveLength(2);
  expect(lines.map(({ label }) => label)).toEqual(["", "then", "on error", ""]);
  expect(width).toBeGreaterThan(Math.max(...xs));
  for (const box of Object.values(boxes)) expect(box.y + box.height).toBeLessThanOrEqual(height);
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
