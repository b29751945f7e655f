import { expect, it } from "vitest";

import { treeOf } from "../src/markdown";

it.each([
  ["quotes", ">".repeat(5000)],
  ["quotes behind a text", `Look:\n\n${"> ".repeat(5000)}a`],
  ["lists", `${"- ".repeat(5000)}a`],
  ["numbered lists", `${"1. ".repeat(5000)}a`],
  ["lists in lists, line by line", Array.from({ length: 500 }, (_, depth) => `${"  ".repeat(depth)}- a`).join("\n")],
  ["stars", `${"*".repeat(20_000)}a${"*".repeat(20_000)}`],
  ["brackets", `${"![".repeat(20_000)}${"]()".repeat(20_000)}`],
  ["footnotes", "[^1]".repeat(20_000)],
])("a text that only stops the parser is not parsed: %s", (_, text) => {
  expect(treeOf(text)).toBeUndefined();
});

it.each(["[a]: /b", "#", "- ", "&nbsp;", "```\n```"])("a text that would show nothing is shown as written: %j", (text) => {
  expect(treeOf(text)).toBeUndefined();
});

it.each([
  ["prose", "This is **bold**, with a [link](https://a.example/x) and `code`.\n\n".repeat(50), 50],
  ["prose with the line ends of Windows", "Some **bold**, *bent* and `code`.\r\n\r\n".repeat(400), 400],
  ["lists within each other", Array.from({ length: 20 }, (_, depth) => `${"  ".repeat(depth)}- a`).join("\n"), 1],
  ["an answer in a chain of mails", `${">".repeat(20)} yes`, 1],
  ["a line", "*".repeat(200), 1],
])("what people write is: %s", (_, text, parts) => {
  expect(treeOf(text)?.children.length).toBe(parts);
});
