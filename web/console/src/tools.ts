/** Front-end tools of the console, offered with each run that the chat starts. */

import { type CallJson, encode, type FrontEndTool, type ToolDefinitionJson } from "@pawl/client";

import { CHART_VALUES_MAX, chartOf } from "./chart";
import { MENU } from "./menu";
import { go, pawl } from "./state";

const PAGES: Record<string, string> = { chat: "/", inbox: "/inbox", ...Object.fromEntries(Object.keys(MENU).map((name) => [name, `/${name}`])), settings: "/settings" };

const FUNCTIONS: Record<string, FrontEndTool> = {
  open_page: ({ page }: { page: string }) => {
    const to = PAGES[page];
    if (!to) throw new Error(`There is no page ${page}. Pages: ${Object.keys(PAGES).join(", ")}.`);
    go(to);
    return { opened: page };
  },
  // The card of the call draws the chart.
  show_chart: (args) => {
    const chart = chartOf(args);
    if (typeof chart === "string") throw new Error(chart);
    return { shown: chart.values.length };
  },
};

// The tools are read-only, so a long list is not a bulk operation.
const OWN = { context: "EXECUTION_CONTEXT_FRONTEND", category: "TOOL_CATEGORY_SAFE", effectClass: "EFFECT_CLASS_READ_ONLY" } as const;

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
    ...OWN,
  },
  {
    name: "show_chart",
    description: "Shows numbers to the user as a bar chart in the chat.",
    argumentsSchemaJson: encode({
      type: "object",
      properties: {
        title: { type: "string" },
        labels: { type: "array", items: { type: "string" } },
        values: { type: "array", items: { type: "number" }, minItems: 1, maxItems: CHART_VALUES_MAX },
      },
      required: ["title", "labels", "values"],
      additionalProperties: false,
    }),
    ...OWN,
  },
];

/** Runs a call of a console tool, in one window. Calls for other front ends are ignored. */
export async function runTool(call: CallJson): Promise<void> {
  if (call.state !== "CALL_STATE_OFFERED" || !Object.hasOwn(FUNCTIONS, call.toolName ?? "")) return;
  await pawl.answer(call, FUNCTIONS).catch(() => {});
}
