import { encode } from "@pawl/client";
import { expect, it } from "vitest";

import { highlight } from "../src/highlight";
import { objectOf, resultLine, title, wish } from "../src/sentence";

const call = (toolName: string, args: object, others = {}) => ({ toolName, argumentsJson: encode(args), ...others });

it.each([
  [call("send_email", { attachments: [], to: ["a@x", "b@x"], subject: "s" }, { agentName: "helpdesk" }), "helpdesk wants to send an e-mail to 2 people"],
  [call("send_email", { to: ["a@x"] }), "The agent wants to send an e-mail to a@x"],
  [call("crm__close_deals", { deal_ids: [1, 2, 3] }), "The agent wants to close deals through crm (3 deals)"],
  [call("evil__send_email", { to: "a@x" }), "The agent wants to send email through evil to a@x"],
  [call("ask_user", {}, { question: { question: "Which one?" } }), "The agent asks: Which one?"],
  [call("ask_user", {}, { question: { question: "One\n\n---\n\ntwo" } }), "The agent asks"],
  [call("constructor", {}), "The agent wants to constructor"],
  [call("toString", {}), "The agent wants to toString"],
  [call("__proto__", {}), "The agent wants to call a tool"],
  [call("approval", { question: "Send it?" }, { approval: { cause: "workflow" } }), "A workflow asks for your approval"],
  [call("evil\u202e", {}), "The agent wants to evil<U+202E>"],
])("a request is a sentence: %#", (asked, sentence) => {
  expect(wish(asked)).toBe(sentence);
});

it("a call is shown with its most informative arguments, and its result in a line", () => {
  expect(title("shop.find_item")).toBe("Find item · shop");
  expect(objectOf(call("send_email", { body: "Hello", subject: "tea", to: ["a@x"] }))).toBe("a@x · tea · Hello");
  expect(resultLine({ result: { contentJson: encode({ documents: [1, 2] }) } })).toBe("2 documents");
  expect(resultLine({ result: { contentJson: encode({ error: "No such page." }), isError: true } })).toBe("No such page.");
});

it.each([
  ["python", "return 1  # 'x'", ["word", "", "number", "", "comment"]],
  ["ts", 'const a = "b//c"; // d', ["word", "", "string", "", "comment"]],
  ["sql", "select 1 -- all", ["word", "", "number", "", "comment"]],
  ["unknown", "return 1", [""]],
])("code keeps its text and gets kinds: %s", (language, code, kinds) => {
  const pieces = highlight(code, language);
  expect(pieces.map(([, text]) => text).join("")).toBe(code);
  expect(pieces.map(([kind]) => kind)).toEqual(kinds);
});
