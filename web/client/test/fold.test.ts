import { describe, expect, it } from "vitest";

import { decode, emptyView, encode, fold, foldGap, type RunEventJson, type RunView } from "../src/index";
import { events } from "../src/stream";

const run = (state: string): RunEventJson => ({ runChanged: { run: { runId: "run_1", state: state as never } } });
const text = (round: number, said: string): RunEventJson => ({ outputDelta: { round, text: said } });
const began = (round: number, modelAttempt = 1): RunEventJson => ({ roundStarted: { round, modelAttempt } });

function told(...all: RunEventJson[]): RunView {
  return all.map((event, index) => ({ ...event, seq: String(index + 1) })).reduce(fold, emptyView({ runId: "run_1" }));
}

describe("fold", () => {
  it("assembles the output of the model", () => {
    const view = told(run("RUN_STATE_RUNNING"), began(1), text(1, "Hel"), text(1, "lo"), run("RUN_STATE_COMPLETED"));
    expect(view).toMatchObject({ rounds: [{ text: "Hello" }], ended: true, seq: 5 });
  });

  it("removes the output of a failed attempt, so that no text appears twice", () => {
    const retry: RunEventJson = { roundRetrying: { round: 1, reason: "STREAM_CUT", message: "cut" } };
    const view = told(began(1), text(1, "Hel"), retry, began(1, 2), text(1, "Hello"));
    expect(view.rounds.map((round) => round.text)).toEqual(["Hello"]);
    expect(view.notes).toMatchObject([{ kind: "retry", text: "cut", round: 1, position: -1 }]);
  });

  it("knows how long the model reasoned", () => {
    const at = (second: number, event: RunEventJson): RunEventJson => ({ ...event, time: new Date(second * 1000).toISOString() });
    const thinks: RunEventJson = { outputDelta: { round: 1, reasoning: "Hm" } };
    const view = told(at(1, began(1)), at(2, thinks), at(5, text(1, "So")), at(9, { roundEnded: { round: 1 } }));
    expect(view.rounds[0]?.reasoningSeconds).toBe(4);
  });

  it("gives warnings and messages a position in the run", () => {
    const warning: RunEventJson = { warning: { reason: "W" } };
    const message: RunEventJson = { messageAdded: { message: { role: "ROLE_USER", text: "more" } } };
    const broken = [began(1), text(1, "Hel"), warning, { roundRetrying: { round: 1, reason: "CUT" } }, began(1, 2)];
    const whole = [text(1, "Hello"), { callChanged: { call: { callId: "c", round: 1 } } }, warning, message];
    const { notes } = told(message, warning, ...broken, ...whole, began(2), warning);
    expect(notes.map((note) => [note.text, note.round, note.position].join(" "))).toEqual(["W 0 -1", "W 1 -1", "CUT 1 -1", "W 1 1", "more 1 1", "W 2 -1"]);
  });

  it("skips events that it already has", () => {
    const once = told(began(1), text(1, "a"));
    expect(fold(once, { ...text(1, "a"), seq: "2" })).toBe(once);
  });

  it("shows a call from draft to result", () => {
    const draft: RunEventJson = { outputDelta: { round: 1, calls: [{ index: 0, toolName: "add", argumentsText: "{" }] } };
    expect(told(began(1), draft).rounds[0]?.drafts).toEqual([{ toolName: "add", arguments: "{" }]);
    const call = (state: string): RunEventJson => ({ callChanged: { call: { callId: "c", round: 1, state: state as never } } });
    const view = told(began(1), draft, call("CALL_STATE_RUNNING"), call("CALL_STATE_SUCCEEDED"));
    expect(view).toMatchObject({ rounds: [{ drafts: [], callIds: ["c"] }], calls: { c: { state: "CALL_STATE_SUCCEEDED" } } });
  });

  it("has a draft for each call, even if a model starts with the second", () => {
    const draft: RunEventJson = { outputDelta: { round: 1, calls: [{ index: 1, toolName: "add", argumentsText: "{" }] } };
    expect(told(began(1), draft).rounds[0]?.drafts).toEqual([{ toolName: "", arguments: "" }, { toolName: "add", arguments: "{" }]);
  });

  it("starts over after a gap", () => {
    const view = foldGap(emptyView({ runId: "run_1" }), { toSeq: "7", snapshot: { run: { runId: "run_1", outputText: "done" } } });
    expect(view).toMatchObject({ gap: true, seq: 7, run: { outputText: "done" } });
    expect(fold(view, { ...text(2, "x"), seq: "8" }).rounds[0]?.text).toBe("x");
  });
});

it("reads server-sent events across chunk boundaries", async () => {
  const whole = new TextEncoder().encode('event: end\ndata: {"key":"ä"}\n\n:\n\ndata: 1\n\n');
  for (const size of [1, 2, 3, 7, 100]) {
    const parts = Array.from({ length: Math.ceil(whole.length / size) }, (_, at) => whole.slice(at * size, (at + 1) * size));
    const start = (out: ReadableStreamDefaultController<Uint8Array>): void => (parts.forEach((each) => out.enqueue(each)), out.close());
    const found: [string, string][] = [];
    for await (const event of events(new ReadableStream<Uint8Array>({ start }))) found.push(event);
    expect(found).toEqual([["end", '{"key":"ä"}'], ["", ""], ["", "1"]]);
  }
});

it("encodes and decodes JSON bytes", () => {
  expect(decode(encode({ a: "ä😀" }))).toEqual({ a: "ä😀" });
  expect(decode(undefined)).toBeUndefined();
  const long = "ä".repeat(300_000);
  expect(decode(encode(long)) === long).toBe(true);
});
