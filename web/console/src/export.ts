/** Saves a conversation as chat completions messages, so that another program can continue it. */

import type { ConversationJson, HistoryMessageJson } from "@pawl/client";

import { pawl } from "./state";

/** The format cannot mark a result as an error, so the content of such a result is an object with the key `error`. */
function failed({ text = "", errorReason }: HistoryMessageJson): string {
  const value: unknown = JSON.parse(text);
  return JSON.stringify({ ...(value instanceof Object && "error" in value ? value : { error: value }), reason: errorReason });
}

function chat(message: HistoryMessageJson): object {
  const { role, text = "", calls = [], callId, isError } = message;
  if (role === "HISTORY_ROLE_TOOL") return { role: "tool", tool_call_id: callId, content: isError ? failed(message) : text };
  if (role === "HISTORY_ROLE_USER") return { role: "user", content: text };
  const asked = calls.map((call) => ({ id: call.callId, type: "function", function: { name: call.toolName, arguments: call.argumentsJson } }));
  return { role: "assistant", content: text || null, ...(asked.length ? { tool_calls: asked } : {}) };
}

export async function save({ conversationId = "", title }: ConversationJson): Promise<void> {
  const found: object[] = [];
  let pageToken = "";
  do {
    const { messages = [], nextPageToken = "" } = await pawl.conversations.exportConversation({ conversationId, pageSize: 200, pageToken });
    found.push(...messages.map(chat));
    pageToken = nextPageToken;
  } while (pageToken);
  const url = URL.createObjectURL(new Blob([JSON.stringify(found, null, 2)], { type: "application/json" }));
  const link = Object.assign(document.createElement("a"), { href: url, download: `${(title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
