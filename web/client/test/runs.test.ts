import { expect, it, vi } from "vitest";

import { Pawl, PawlError } from "../src/index";
import { client } from "./gateway";

const EVENT = (seq: number) => ({ seq: String(seq), outputDelta: { text: `${seq}\u2028event: end\u2029data: x` } });
const EVENTS = (...seqs: number[]) => `data: ${JSON.stringify({ key: "s0", message: { events: seqs.map(EVENT) } })}\n\n`;
const END = 'event: end\ndata: {"key":"s0"}\n\n';

it("yields each event of a run once, across reconnects", async () => {
  const { pawl, asked } = client(EVENTS(4, 5), EVENTS(5, 6) + END);
  const seen: string[] = [];
  const read = (async () => {
    for await (const event of pawl.events("r", { afterSeq: 3 })) seen.push(event.outputDelta!.text!);
  })();
  await vi.advanceTimersByTimeAsync(1000);
  await read;
  expect(seen).toEqual([4, 5, 6].map((seq) => EVENT(seq).outputDelta.text));
  expect(asked.map(({ subscriptions }) => subscriptions.s0.request.afterSeq)).toEqual(["3", "5"]);
});

it("throws the error that ends a stream, with its reason", async () => {
  const error = { code: "not_found", message: "No such run", details: [{ debug: { reason: "RUN_NOT_FOUND" } }] };
  const { pawl } = client(`event: end\ndata: ${JSON.stringify({ key: "s0", error })}\n\n`);
  const read = pawl.events("r").next().catch((thrown: unknown) => thrown);
  await vi.advanceTimersByTimeAsync(20);
  expect(await read).toBeInstanceOf(PawlError);
  expect(await read).toMatchObject({ code: "not_found", reason: "RUN_NOT_FOUND" });
});

it("stops watching when the reader leaves or its signal is aborted", async () => {
  const { pawl, asked } = client(EVENTS(1));
  const leaving = (async () => {
    for await (const _ of pawl.events("r")) break;
  })();
  await vi.advanceTimersByTimeAsync(20);
  await leaving;
  const controller = new AbortController();
  const next = pawl.events("r", { afterSeq: 1, signal: controller.signal }).next();
  await vi.advanceTimersByTimeAsync(20);
  controller.abort();
  expect(await next).toEqual({ done: true, value: undefined });
  const times = asked.length;
  await vi.advanceTimersByTimeAsync(60_000);
  expect(asked.length).toBe(times);
});

it("delivers no events after an abort, even to a busy reader, and leaves other streams alone", async () => {
  let body!: ReadableStreamDefaultController<Uint8Array>;
  const { pawl } = client(new Response(new ReadableStream({ start: (opened) => void (body = opened) })));
  const say = (seq: number): void => body.enqueue(new TextEncoder().encode(EVENTS(seq)));
  pawl.streams.onState = vi.fn();
  const controller = new AbortController();
  const read = pawl.events("r", { signal: controller.signal });
  const first = read.next();
  await vi.advanceTimersByTimeAsync(20);
  say(1);
  await first;
  controller.abort();
  say(2);
  await vi.advanceTimersByTimeAsync(5);
  expect(pawl.streams.onState).not.toHaveBeenCalledWith(false);
  expect((await read.next()).done).toBe(true);
});

it("follows the changes of a waiting run until its result", async () => {
  const waiting = (lastSeq: string) => ({ run: { state: "RUN_STATE_WAITING", lastSeq } });
  const { pawl, asked } = client(waiting("4"), waiting("7"), { run: { state: "RUN_STATE_COMPLETED", outputText: "391" } });
  expect((await pawl.result("r")).outputText).toBe("391");
  expect(asked.map(({ afterSeq }) => afterSeq)).toEqual(["0", "4", "7"]);
});

it.each([
  ["what reads", (pawl: Pawl) => pawl.agent.getRun({ runId: "r" }), 4],
  ["a request with its own id", (pawl: Pawl) => pawl.agent.startRun({ requestId: "q", text: "hi" }), 4],
  ["not a request whose response has a secret", (pawl: Pawl) => pawl.channels.createChannel({ requestId: "q", channel: {} }), 1],
  ["nothing else", (pawl: Pawl) => pawl.agent.startRun({ text: "hi" }), 1],
])("retries %s unchanged while no gateway answers", async (_, ask, times) => {
  const brokenOff = new Response('{"run":{"ru');
  const { pawl, asked } = client(new TypeError("refused"), new Response("", { status: 502 }), brokenOff, { run: { runId: "r" } });
  const answer = ask(pawl).catch((error: PawlError) => error.code);
  await vi.advanceTimersByTimeAsync(1760);
  expect([await answer, asked.length]).toEqual([times > 1 ? { run: { runId: "r" } } : "unavailable", times]);
  expect(asked).toEqual(asked.map(() => asked[0]));
});

it("stops after a few attempts, and immediately on a response", async () => {
  const answers = ["not_found", "deadline_exceeded"].map((code) => Response.json({ code }, { status: 408 }));
  const all = [...answers, new TypeError("refused")].map((answer) => client(answer));
  const settled = Promise.allSettled(all.map(({ pawl }) => pawl.agent.getRun({ runId: "r" })));
  await vi.advanceTimersByTimeAsync(60_000);
  expect((await settled).map(({ status }) => status)).toEqual(["rejected", "rejected", "rejected"]);
  expect(all.map(({ asked }) => asked.length)).toEqual([1, 1, 5]);
});

it("retries an interrupted response with the original request", async () => {
  const late = new Promise<Response>((_, fail) => setTimeout(() => fail(new TypeError("reset")), 20_000));
  const fetch = vi.fn().mockReturnValueOnce(late).mockImplementation(async () => Response.json({ run: {} }));
  const request = { requestId: "q", text: "one" };
  const answer = new Pawl({ fetch }).agent.startRun(request);
  request.text = "two";
  await vi.advanceTimersByTimeAsync(20_260);
  expect([await answer, ...fetch.mock.calls.map(([, { body }]) => JSON.parse(body).text)]).toEqual([{ run: {} }, "one", "one"]);
});

it.each([0, 100])("stops immediately on abort, in a response or between attempts: %s", async (failsMs) => {
  const asking = new AbortController();
  const fetch = vi.fn(async (_: unknown, request?: RequestInit) => {
    if (failsMs) throw new TypeError("refused");
    return new Response(new ReadableStream({ start: (out) => request!.signal!.addEventListener("abort", () => out.error("cut")) }));
  });
  const answer = new Pawl({ fetch }).agent.startRun({ requestId: failsMs ? "q" : "" }, { signal: asking.signal }).catch((error) => error.name);
  await vi.advanceTimersByTimeAsync(failsMs);
  asking.abort();
  expect([await answer, fetch.mock.calls.length]).toEqual(["AbortError", 1]);
});

it("watches the nodes of a workflow run until it ends", async () => {
  const at = (state: string, lastSeq: string) => ({ run: { state, lastSeq }, nodes: [{ path: "fetch" }] });
  const { pawl, asked } = client(at("RUN_STATE_RUNNING", "3"), { run: {} }, at("RUN_STATE_COMPLETED", "5"));
  const seen: unknown[] = [];
  pawl.watchExecution("r", ({ run, nodes }) => seen.push(run?.state, nodes?.[0]?.path));
  await vi.advanceTimersByTimeAsync(5000);
  expect(seen).toEqual(["RUN_STATE_RUNNING", "fetch", "RUN_STATE_COMPLETED", "fetch"]);
  expect(asked).toEqual([{ runId: "r" }, { runId: "r", waitSeconds: 1, afterSeq: "3" }, { runId: "r" }]);
});

it("stops watching a workflow run without an error", async () => {
  const { pawl, asked } = client(new TypeError("offline"));
  const failed = vi.fn();
  const leave = pawl.watchExecution("r", () => {}, failed);
  await vi.advanceTimersByTimeAsync(20_000);
  leave();
  await vi.advanceTimersByTimeAsync(20_000);
  const times = asked.length;
  await vi.advanceTimersByTimeAsync(60_000);
  expect(asked.length).toBe(times);
  expect(failed).not.toHaveBeenCalled();
});
