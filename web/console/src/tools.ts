/** What the model can do in this page: tools that are offered with each run that the chat starts. */

import { encode, type FrontEndTool } from "@pawl/client";

import type { ToolDefinitionJson } from "../../client/gen/pawl/tool/v1/tool_pb";
import type { CallJson } from "../../client/gen/pawl/event/v1/call_pb";
import { go, pawl } from "./state";

const PAGES: Record<string, string> = { chat: "/", inbox: "/inbox", runs: "/runs", background: "/background" };

const FUNCTIONS: Record<string, FrontEndTool> = {
  open_page: ({ page }: { page: string }) => {
    const to = PAGES[page];
    if (!to) throw new Error(`There is no page ${page}; there are ${Object.keys(PAGES).join(", ")}.`);
    go(to);
    return { opened: page };
  },
};

export const TOOLS: ToolDefinitionJson[] = [
  {
    name: "open_page",
    description: "Opens a page of this console for the user.",
    argumentsSchemaJson: encode({
      type: "object",
      properties: { page: { enum: Object.keys(PAGES) } },
      required: ["page"],
      additionalProperties: false,
    }),
    context: "EXECUTION_CONTEXT_FRONTEND",
    category: "TOOL_CATEGORY_SAFE",
    effectClass: "EFFECT_CLASS_IDEMPOTENT",
  },
];

const done = new Set<string>();

/** Runs a call that is offered to this page, once; another tab that is quicker has run it. */
export async function runTool(call: CallJson): Promise<void> {
  const id = call.callId ?? "";
  if (call.state !== "CALL_STATE_OFFERED" || done.has(id) || document.hidden) return;
  done.add(id);
  await pawl.answer(call, FUNCTIONS).catch(() => done.delete(id));
}
