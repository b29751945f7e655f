import { expect, it } from "vitest";

// tests/unit/agent_loop/test_golden.py and tests/unit/gateway/test_agui.py read the same files.
import log from "../../../tests/golden/run.json";
import told from "../../../tests/golden/told.json";
import { emptyView, fold, type RunEventJson, type RunView } from "../src/index";

const events = log as RunEventJson[];
const text = (bytes?: string): string => new TextDecoder().decode(Uint8Array.from(atob(bytes ?? ""), (each) => each.charCodeAt(0)));

/** The content of a view, in order. */
function shown(view: RunView): object[] {
  return view.rounds.flatMap((round) => [
    ...(round.reasoning ? [{ reasoning: round.reasoning }] : []),
    ...(round.text ? [{ text: round.text }] : []),
    ...round.callIds.map((id) => {
      const call = view.calls[id];
      return { call: id, tool: call?.toolName, arguments: text(call?.argumentsJson), result: text(call?.result?.contentJson) };
    }),
  ]);
}

it("folds the golden log into the shared view", () => {
  const view = events.reduce(fold, emptyView({}));
  expect(shown(view)).toEqual(told);
  expect(view.ended).toBe(true);
  expect(events.reduce(fold, view)).toEqual(view);
});
