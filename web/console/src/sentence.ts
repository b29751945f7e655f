/** Calls in words: the action, its main argument and the tool's icon. */

import { type CallJson, decode } from "@pawl/client";

import type { IconName } from "./design/icons";
import { isBig, parse } from "./json";
import { visible } from "./visible";

const VERBS: Record<string, string> = {
  send_email: "send an e-mail",
  web_scrape: "read a web page",
  search_documents: "search the documents",
  get_current_time: "look up the time",
  ask_user: "ask a question",
  run_agent: "start an agent",
  show_chart: "draw a chart",
  open_page: "open a page",
  stop_job: "stop a background job",
  "workflow.items": "run the items",
  "workflow.run": "run a workflow",
  "workflow.undo": "undo the effects",
};
const ICONS: [RegExp, IconName][] = [
  [/mail|message|notify/, "mail"],
  [/web|http|url|scrape|browse|crawl/, "web"],
  [/search|find|look|list|get_/, "search"],
  [/ask/, "help"],
  [/agent/, "agents"],
  [/doc|file|read|folder|memory|note/, "documents"],
  [/time|date|schedule|calendar/, "schedules"],
  [/job|background/, "background"],
  [/task|project|check/, "check"],
];
/** Arguments that describe a call best, most informative first. */
const TELLING = ["to", "recipients", "subject", "title", "name", "query", "question", "url", "path", "expression", "text", "task", "page"];
const LENGTH_MAX = 90;
const RESULT_MAX = 60;

/** Returns the action of a tool, as it follows "wants to ...". */
export function verb(toolName = ""): string {
  if (Object.hasOwn(VERBS, toolName)) return VERBS[toolName]!;
  return visible(toolName.split(/__|[./]/).at(-1)!.replaceAll("_", " ").trim() || "call a tool");
}

/** The source of a tool, as in crm.find or crm__find. Its tools can have the names of built-in tools. */
export const sourceOf = (toolName = ""): string => visible(/^(.+)(?:__|[./])[^_]/.exec(toolName)?.[1] ?? "");

export function title(toolName = ""): string {
  const words = verb(toolName);
  return [words.slice(0, 1).toUpperCase() + words.slice(1), !Object.hasOwn(VERBS, toolName) && sourceOf(toolName)].filter(Boolean).join(" · ");
}

export const iconOf = (toolName = ""): IconName => ICONS.find(([name]) => name.test(toolName))?.[1] ?? "tools";

/** Returns the parsed JSON, or the text itself if it is not JSON. */
export function read(bytes: string | undefined): unknown {
  try {
    return decode(bytes, parse);
  } catch {
    return "(not JSON)";
  }
}

export const argumentsOf = ({ argumentsJson, proposedArguments }: CallJson): unknown => argumentsJson ? read(argumentsJson) : proposedArguments;

export function entriesOf(value: unknown): [string, unknown][] {
  return typeof value === "object" && value !== null && !Array.isArray(value) && !isBig(value) ? Object.entries(value) : [];
}

/** Shows a value in words: lists with commas, other objects as JSON. */
export function inWords(value: unknown): string {
  if (typeof value === "string") return visible(value);
  if (Array.isArray(value) && value.every((each) => typeof each === "string")) return visible(value.join(", ")) || "none";
  return visible(JSON.stringify(value) ?? "");
}

function short(text: string, most = LENGTH_MAX): string {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > most ? `${line.slice(0, most)} ...` : line;
}

export function objectOf(call: CallJson): string {
  const all = argumentsOf(call);
  const entries = entriesOf(all).filter(([, value]) => value && !(Array.isArray(value) && !value.length));
  if (!entries.length) return typeof all === "string" ? short(visible(all)) : "";
  const rank = (name: string): number => (TELLING.includes(name) ? TELLING.indexOf(name) : TELLING.length);
  const isCount = (value: unknown): boolean => typeof value === "number" || typeof value === "boolean";
  const saying = entries.filter(([, value]) => !isCount(value));
  const telling = (saying.length ? saying : entries).sort(([one], [other]) => rank(one) - rank(other)).slice(0, 3);
  // A number or a flag means nothing without its name.
  return short(telling.map(([name, value]) => (isCount(value) ? `${name.replaceAll("_", " ")} ${value}` : inWords(value))).join(" · "));
}

export const isPlain = (question: string): boolean => question.length < 140 && !/[\n*_`[\]|<>#]/.test(question);

/** True for a question of a workflow that is answered by approving or rejecting: there is no tool to run. */
export const isOfNode = ({ approval }: CallJson): boolean => approval?.cause === "workflow";

/** The title of a request: "helpdesk wants to send an e-mail to 5 people". */
export function wish(call: CallJson): string {
  const who = visible(call.agentName || "The agent");
  if (call.question) return call.question.question && isPlain(call.question.question) ? `${who} asks: ${visible(call.question.question)}` : `${who} asks`;
  if (isOfNode(call)) return "A workflow asks for your approval";
  const source = sourceOf(call.toolName);
  return `${who} wants to ${verb(call.toolName)}${source && ` through ${source}`}${target(entriesOf(argumentsOf(call)))}`;
}

function target(entries: [string, unknown][]): string {
  const receivers = entries.find(([name]) => name === "to" || name === "recipients")?.[1];
  const many = Array.isArray(receivers) ? receivers : [];
  if (many.length > 1) return ` to ${many.length} people`;
  const one = many[0] ?? receivers;
  if (typeof one === "string" && one) return ` to ${short(visible(one))}`;
  const [name = "", list] = entries.find(([, value]) => Array.isArray(value) && value.length > 1) ?? [];
  return Array.isArray(list) ? ` (${list.length} ${visible(name.replace(/_?ids?$/, "s").replaceAll("_", " "))})` : "";
}

export function resultLine(call: CallJson): string {
  const { result } = call;
  if (!result) return "";
  const value = read(result.contentJson);
  if (Array.isArray(value)) return value.length === 1 ? "1 result" : `${value.length} results`;
  // Repeated arguments add no information.
  const known = new Set(entriesOf(argumentsOf(call)).map(([, each]) => JSON.stringify(each)));
  const entries = entriesOf(value).filter(([, each]) => !known.has(JSON.stringify(each)));
  const main = entries.find(([name]) => ["error", "result", "summary", "message", "text"].includes(name)) ?? (entries.length === 1 ? entries[0] : undefined);
  if (main && !Array.isArray(main[1])) return short(inWords(main[1]), RESULT_MAX);
  const list = entries.find(([, each]) => Array.isArray(each));
  if (list) return `${(list[1] as unknown[]).length} ${visible(list[0].replaceAll("_", " "))}`;
  return entries.length ? short(entries.map(([, each]) => inWords(each)).join(" · "), RESULT_MAX) : short(inWords(value), RESULT_MAX);
}
