/** Saves a conversation as chat completions messages, so that another program can continue it. */

import { type CallJson, type ConversationJson, decode, type MessageJson } from "@pawl/client";

import { pawl } from "./state";

const PAGE = 200;

async function all<T>(read: (pageToken: string) => Promise<[T[] | undefined, string | undefined]>): Promise<T[]> {
  const found: T[] = [];
  let pageToken = "";
  do {
    const [some = [], next = ""] = await read(pageToken);
    found.push(...some);
    pageToken = next;
  } while (pageToken);
  return found;
}

const text = (bytes: string | undefined): string => (decode(bytes, (each) => each) as string | undefined) ?? "";

function chat(message: MessageJson, calls: Map<string, CallJson>): object[] {
  if (message.role === "ROLE_SUMMARY") return [];
  if (message.role === "ROLE_NOTICE") return [{ role: "user", content: `Background jobs report: ${text(message.noticesJson) || "[]"}` }];
  if (message.role === "ROLE_USER") {
    const attachments = (message.parts ?? []).filter((part) => part.text === undefined).map(() => "[an attachment]");
    return [{ role: "user", content: [message.text, ...attachments].filter(Boolean).join("\n\n") }];
  }
  const known = (message.callIds ?? []).flatMap((id) => calls.get(id) ?? []);
  const content = message.text || message.refusal;
  if (!content && !known.length) return [];
  const asked = known.map((call) => ({ id: call.callId, type: "function", function: { name: call.toolName, arguments: text(call.argumentsJson) } }));
  const answer = { role: "assistant", content: content || null, ...(known.length ? { tool_calls: asked } : {}) };
  return [answer, ...known.map((call) => ({ role: "tool", tool_call_id: call.callId, content: call.result ? text(call.result.contentJson) : '{"error":"The call has not ended."}' }))];
}

export async function save({ conversationId = "", title }: ConversationJson): Promise<void> {
  const messages = await all<MessageJson>((pageToken) => pawl.agent.listMessages({ conversationId, pageSize: PAGE, pageToken }).then((page) => [page.messages, page.nextPageToken]));
  const calls = new Map<string, CallJson>();
  for (const runId of new Set(messages.filter(({ callIds }) => callIds?.length).map(({ runId }) => runId ?? "")))
    for (const call of await all<CallJson>((pageToken) => pawl.agent.listCalls({ runId, pageSize: PAGE, pageToken }).then((page) => [page.calls, page.nextPageToken])).catch(() => [])) calls.set(call.callId ?? "", call);
  const url = URL.createObjectURL(new Blob([JSON.stringify(messages.flatMap((message) => chat(message, calls)), null, 2)], { type: "application/json" }));
  const link = Object.assign(document.createElement("a"), { href: url, download: `${(title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
