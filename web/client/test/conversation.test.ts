import { expect, it, vi } from "vitest";

import { type ConversationView, emptyConversation, foldConversation, pendingCalls, type RunEventJson, turnsOf, type WatchConversationResponseJson } from "../src/index";
import { type Answer, client } from "./gateway";

const RESPONSE = (message: WatchConversationResponseJson, key = "s0"): string => `data: ${JSON.stringify({ key, message })}\n\n`;
const FAILED = (code: string, reason: string): string => `event: end\ndata: ${JSON.stringify({ key: "s0", error: { code, details: [{ debug: { reason } }] } })}\n\n`;
const MESSAGE = (number: number) => ({ message: { number: String(number), runId: `r${number}`, role: "ROLE_USER" as const, text: `m${number}` } });
const OPEN = (): Answer => new Response(new ReadableStream({ start: () => {} }));
// Runs and jobs that ended before, as the client lists them after catching up.
const PAST = [{}, {}];

function follow(...answers: Answer[]) {
  const { pawl, asked } = client(...answers);
  const [views, failed] = [[] as ConversationView[], vi.fn()];
  const leave = pawl.follow("c", (view) => views.push(view), failed);
  const cursors = () => asked.flatMap(({ subscriptions = {} }) => Object.values<any>(subscriptions).flatMap(({ request }) => request.after ?? []));
  return { asked, views, failed, leave, cursors };
}

it("continues after the last response that it has applied, so each message appears once", async () => {
  const first = RESPONSE({ cursor: "1", items: [MESSAGE(1), MESSAGE(2)], caughtUp: true });
  const { views, cursors } = follow(first + RESPONSE({}), ...PAST, RESPONSE({ cursor: "2", items: [MESSAGE(2), MESSAGE(3)] }), OPEN());
  await vi.advanceTimersByTimeAsync(2000);
  expect(views.at(-1)!.messages.map(({ text }) => text)).toEqual(["m1", "m2", "m3"]);
  expect(cursors()).toEqual(["", "1", "2"]);
});

it("starts over if its position no longer exists", async () => {
  const start = RESPONSE({ cursor: "9", items: [MESSAGE(1), MESSAGE(2)], caughtUp: true });
  const restored = RESPONSE({ cursor: "3", items: [MESSAGE(1)], caughtUp: true }, "s1");
  const { views, failed, cursors } = follow(start, ...PAST, FAILED("out_of_range", "SEQ_BEYOND_END"), restored, ...PAST, OPEN());
  await vi.advanceTimersByTimeAsync(3000);
  expect(views.at(-1)!.messages.length).toBe(1);
  expect([cursors().slice(0, 3), failed.mock.calls]).toEqual([["", "9", ""], []]);
});

it.each([
  ["failed_precondition", "CONVERSATION_ERASED", 1],
  ["unauthenticated", "KEY_REVOKED", 1],
  ["resource_exhausted", "SLOW_CONSUMER", 0],
  ["unauthenticated", "SESSION_EXPIRED", 0],
])("ends with an error that does not pass, once: %s %s", async (code, reason, times) => {
  const { asked, failed } = follow(FAILED(code, reason), OPEN());
  await vi.advanceTimersByTimeAsync(2000);
  expect(failed).toHaveBeenCalledTimes(times);
  expect(asked.length).toBe(2 - times);
});

it("reads the logs of runs that ended before", async () => {
  const run = { runId: "r1", state: "RUN_STATE_COMPLETED" as const };
  const job = { runId: "j1", state: "RUN_STATE_COMPLETED" as const, reportsToConversationId: "c" };
  const log = `data: ${JSON.stringify({ key: "s1", message: { events: [{ seq: "1", outputDelta: { round: 1, text: "done" } }] } })}\n\nevent: end\ndata: {"key":"s1"}\n\n`;
  const { views, asked } = follow(RESPONSE({ cursor: "1", items: [MESSAGE(1)], caughtUp: true }), { runs: [run, job] }, { jobs: [{ jobId: "j1" }] }, log, OPEN());
  await vi.advanceTimersByTimeAsync(2000);
  expect(turnsOf(views.at(-1)!).map((turn) => [turn.asked, turn.log.rounds[0]?.text])).toEqual([["m1", "done"]]);
  expect(Object.keys(views.at(-1)!.jobs)).toEqual(["j1"]);
  expect(asked[3].subscriptions.s1.request).toEqual({ runId: "r1", afterSeq: "0" });
});

it("passes each event once if the stream also has events of a run that ended before", async () => {
  const run = { runId: "r1", state: "RUN_STATE_COMPLETED" as const };
  const events = ["a", "b", "c"].map((text, index) => ({ runId: "r1", seq: String(index + 1), outputDelta: { round: 1, text } }));
  const log = [1, 3].map((count) => RESPONSE({ events: events.slice(count - 1, count) }, "s1")).join("");
  const { pawl } = client(RESPONSE({ cursor: "1", items: [{ run }] }) + RESPONSE({ cursor: "2", events: events.slice(0, 2) }), log, OPEN());
  const [passed, texts] = [[] as (string | undefined)[], [] as (string | undefined)[]];
  pawl.follow("c", (view, fresh) => {
    passed.push(...fresh.map(({ seq }) => seq));
    texts.push(view.logs["r1"]?.rounds[0]?.text);
  });
  await vi.advanceTimersByTimeAsync(3000);
  expect(passed).toEqual(["1", "2", "3"]);
  expect(texts.filter(Boolean)[0]).toBe("ab");
});

it.each([1, 2])("asks for nothing and changes nothing once it was left, at change %s", async (at) => {
  const run = { runId: "r", state: "RUN_STATE_FAILED" as const };
  const { pawl, asked } = client(RESPONSE({ cursor: "1", caughtUp: true }), { runs: [run] }, {}, OPEN());
  let changes = 0;
  const leave = pawl.follow("c", () => ++changes === at && leave());
  await vi.advanceTimersByTimeAsync(5000);
  expect([changes, asked.length]).toEqual([at, at === 1 ? 1 : 3]);
});

const EVENT = (seq: number, kind: RunEventJson): RunEventJson => ({ runId: "r2", seq: String(seq), ...kind });
const TURN: WatchConversationResponseJson[] = [
  { cursor: "1", items: [MESSAGE(1), { run: { runId: "r1", state: "RUN_STATE_COMPLETED", createTime: "2026-05-02T00:00:00Z" } }], caughtUp: true },
  { cursor: "2", items: [{ job: { jobId: "j", pendingCalls: [{ callId: "ask" }] } }, { run: { runId: "r2", generation: 1, job: {}, state: "RUN_STATE_RUNNING", createTime: "2026-05-02T00:00:01Z" } }] },
  { cursor: "3", items: [{ message: { number: "2", runId: "r2", role: "ROLE_NOTICE", text: "It is done." } }], events: [EVENT(1, { roundStarted: { round: 1, modelAttempt: 1 } })] },
  { cursor: "4", events: [EVENT(2, { outputDelta: { round: 1, text: "Your " } }), EVENT(3, { outputDelta: { round: 1, text: "file" } })] },
  { cursor: "5", items: [{ run: { runId: "child", parentRunId: "r2", pendingCalls: [{ callId: "child's" }] } }] },
  { cursor: "6", items: [{ message: { number: "3", runId: "r2", role: "ROLE_ASSISTANT", text: "Your file" } }, { job: { jobId: "j" } }] },
  { cursor: "7", items: [{ run: { runId: "r2", generation: 1, state: "RUN_STATE_COMPLETED", createTime: "2026-05-02T00:00:01Z" } }], events: [EVENT(4, { runChanged: { run: { runId: "r2", generation: 1, state: "RUN_STATE_COMPLETED" } } })] },
];

it("shows a turn that a job started while the model writes it", () => {
  const views = TURN.map((_, index) => TURN.slice(0, index + 1).reduce(foldConversation, emptyConversation("c")));
  const shown = views.map((view) => turnsOf(view).slice(1).map(({ notice, asked, log }) => [notice, asked, log.rounds[0]?.text ?? "", log.ended]));
  expect(shown).toEqual([
    [],
    [[true, "", "", false]],
    [[true, "It is done.", "", false]],
    ...[3, 4, 5].map(() => [[true, "It is done.", "Your file", false]]),
    [[true, "It is done.", "Your file", true]],
  ]);
  expect(views.map((view) => pendingCalls(view).map(({ callId }) => callId).join())).toEqual(["", "ask", "ask", "ask", "child's,ask", "child's", "child's"]);
});

it("folds any repetition of a response to the same view", () => {
  const whole = TURN.reduce(foldConversation, emptyConversation("c"));
  for (let from = 0; from < TURN.length; from++) {
    const again = [...TURN.slice(0, from + 1), ...TURN.slice(from)].reduce(foldConversation, emptyConversation("c"));
    expect(again).toEqual(whole);
  }
});

it("replaces deleted events by the gap, and knows that earlier messages are missing", () => {
  const events = { runId: "r2", toSeq: "7", snapshot: { run: { runId: "r2", outputText: "all" } } };
  const view = foldConversation(emptyConversation("c"), { cursor: "1", gap: { firstMessageNumber: "501", events }, items: [MESSAGE(501)] });
  expect([view.firstNumber, view.logs["r2"]]).toMatchObject([501, { gap: true, seq: 7, run: { outputText: "all" } }]);
});

it("shows neither silent turns of jobs nor imported placeholders", () => {
  const imported = ["a", "b"].map((text, index) => ({ message: { number: String(index + 1), runId: "none", imported: true, role: "ROLE_USER" as const, text } }));
  const silent = [{ run: { runId: "r9", generation: 1, state: "RUN_STATE_COMPLETED" as const } }, { message: { number: "3", runId: "r9", role: "ROLE_NOTICE" as const, text: "n" } }];
  const view = foldConversation(emptyConversation("c"), { cursor: "1", items: [...imported, ...silent] });
  expect(turnsOf(view).map(({ asked, known }) => [asked, known])).toEqual([["a", false], ["b", false]]);
});
