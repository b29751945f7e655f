/** Short titles of runs. */

import { signal } from "@preact/signals";
import type { RunJson } from "@pawl/client";

import { parsed, unpack } from "./json";
import { title as titleOfTool } from "./sentence";
import { pawl, titleOf } from "./state";
import { visible } from "./visible";

const PAGES_MAX = 3;
const LENGTH_MAX = 160;

const asked = signal<ReadonlyMap<string, string>>(new Map());
const reading = new Set<string>();

/** On one line. JSON is replaced by its subject, if it has one. */
const short = (text: string): string => visible(text.replace(/\s+/g, " ").replace(/[{[]".*/, (json) => /"(?:subject|title|summary|name)": ?"([^"\\]+)/.exec(json)?.[1] ?? "…").trim().slice(0, LENGTH_MAX));

async function read(conversationId: string, runId: string): Promise<void> {
  const found = new Map<string, string>([[runId, ""]]);
  for (let page = 0, pageToken: string | undefined = ""; pageToken !== undefined && page < PAGES_MAX && !found.get(runId); page++) {
    const { messages = [], nextPageToken }: Awaited<ReturnType<typeof pawl.agent.listMessages>> = await pawl.agent.listMessages({ conversationId, pageSize: 100, pageToken });
    for (const { runId: of = "", role, text = "" } of messages) if (role === "ROLE_USER" && !found.get(of)) found.set(of, text || "Files");
    pageToken = nextPageToken || undefined;
  }
  asked.value = new Map([...asked.value, ...found]);
}

/** True for a run that no message started, for example a run that reports the end of a job. */
export const isFollowUp = (runId: string): boolean => asked.value.get(runId) === "";

/** The tool of a job's conversation or the workflow of a workflow's conversation, by its title. */
export function madeBy(title: string): { tool?: string | undefined; workflow?: string | undefined } | undefined {
  const [, tool, workflow] = /^(?:(\S+) \(in the background\)|\[Workflow ([^,:\]]+).*\])$/.exec(title) ?? [];
  return tool || workflow ? { tool, workflow } : undefined;
}

/** The title of a conversation, as people say it. */
export function nameOf(title: string): string {
  const { tool, workflow } = madeBy(title) ?? {};
  return tool ? titleOfTool(tool) : (workflow ?? short(title));
}

/** The whole message that started a run, once it is read. */
export const messageOf = (runId: string): string => asked.value.get(runId) ?? "";

/** The start of the message that started a run. Otherwise the title of its conversation; nothing until one of them is read. */
export function askedIn(conversationId: string, runId: string): string {
  const known = asked.value.get(runId);
  if (known !== undefined) return short(known) || nameOf(titleOf(conversationId));
  if (!reading.has(conversationId)) {
    reading.add(conversationId);
    // Not while a page is drawn.
    queueMicrotask(() => void read(conversationId, runId).catch(() => (asked.value = new Map(asked.value).set(runId, ""))).then(() => reading.delete(conversationId)));
  }
  return "";
}

/** The subject of a run: its message, the input of its workflow, the call of its job, or its aim. */
export function aboutOf({ runId = "", conversationId = "", workflow, job, goal, undo }: RunJson): string {
  if (undo) return "Undo another run";
  if (goal) return short(goal.aim ?? "");
  if (workflow?.chunk) return `${workflow.name}: ${workflow.chunk.node}, items from ${workflow.chunk.firstIndex ?? 0}`;
  if (workflow) return short([workflow.name, values(unpack({ inputJson: workflow.inputJson }).inputJson)].filter(Boolean).join(": "));
  if (job) return short([titleOfTool(job.toolName), values(unpack({ argumentsJson: job.argumentsJson }).argumentsJson)].filter(Boolean).join(": "));
  return conversationId && askedIn(conversationId, runId);
}

/** A short JSON object as names and values; other text unchanged. */
export const inPairs = (text = ""): string => short(values(parsed(text))) || text;

function values(value: unknown): string {
  return typeof value === "object" && value !== null && !Array.isArray(value) ? Object.entries(value).map(([name, each]) => `${name} ${typeof each === "string" ? each : JSON.stringify(each)}`).join(", ") : "";
}
