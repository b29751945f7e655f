import { describe, expect, it, vi } from "vitest";

import { type CallJson, decode, encode, type FrontEndTool, Pawl, type ReceiptJson } from "../src/index";
import "./gateway";

const CALL: CallJson = { runId: "r", callId: "c", toolName: "paint", state: "CALL_STATE_OFFERED", argumentsJson: encode({ hue: 7 }), effectClass: "EFFECT_CLASS_IDEMPOTENT" };

/** A gateway with one call and leases of 30 s. It accepts the first result, and records all submissions. */
function gateway(open: CallJson = CALL, answers: (Response | Error | ReceiptJson)[] = []) {
  const submitted: { requestId: string; content: unknown; isError: boolean }[] = [];
  let call = open;
  let expires = Date.parse(open.offer?.expireTime ?? "") || 0;
  const fetch = async (url: unknown, request?: RequestInit): Promise<Response> => {
    const { requestId, clientId, results } = JSON.parse(request!.body as string);
    const offered = call.state === "CALL_STATE_OFFERED";
    if (String(url).endsWith("/LeaseCall")) {
      const held = expires > Date.now();
      const granted = offered && (!held || call.offer?.clientId === clientId);
      const offerEpoch = String(Number(call.offer?.offerEpoch ?? 0) + (held ? 0 : 1));
      if (granted) [expires, call] = [Date.now() + 30_000, { ...call, offer: { clientId, offerEpoch } }];
      return Response.json({ granted, call, leaseSeconds: 30 });
    }
    submitted.push({ requestId, content: decode(results[0].contentJson), isError: results[0].isError });
    const holds = call.offer?.clientId === clientId && call.offer?.offerEpoch === results[0].offerEpoch;
    const taken = holds ? "RECEIPT_STATUS_ACCEPTED" : "RECEIPT_STATUS_WRONG_HOLDER";
    const answer = answers.shift() ?? { status: offered ? taken : "RECEIPT_STATUS_LATE" };
    if (answer instanceof Error) throw answer;
    if (answer instanceof Response) return answer;
    if (answer.status === "RECEIPT_STATUS_ACCEPTED") call = { ...call, state: "CALL_STATE_SUCCEEDED" };
    return Response.json({ receipts: [answer] });
  };
  return { window: () => new Pawl({ fetch }), submitted, told: () => submitted.map(({ content, isError }) => [content, isError]) };
}

describe("a call offered to a page", () => {
  const cases: [string, Record<string, FrontEndTool>, unknown, boolean, string?][] = [
    ["returns the result of the function", { paint: ({ hue }) => ({ painted: hue }) }, { painted: 7 }, false],
    ["returns null for a function that returns nothing", { paint: () => {} }, null, false],
    ["fails with the thrown error", { paint: () => Promise.reject(new Error("no paint")) }, { error: "no paint" }, true],
    ["fails where the tool is unknown", { draw: () => 1 }, { error: "This front end has no tool paint." }, true],
    ["has no function from the prototype of the tools", {}, { error: "This front end has no tool toString." }, true, "toString"],
    ["fails with what JSON cannot say", { paint: () => 1n }, { error: "Do not know how to serialize a BigInt" }, true],
  ];
  it.each(cases)("%s", async (_, tools, content, isError, toolName = "paint") => {
    const { window, told } = gateway({ ...CALL, toolName });
    expect((await window().answer({ ...CALL, toolName }, tools))?.status).toBe("RECEIPT_STATUS_ACCEPTED");
    expect(told()).toEqual([[content, isError]]);
  });

  it("runs once, in one of two visible windows, however often it is offered", async () => {
    const { window, told } = gateway();
    const paint = vi.fn(() => new Promise((done) => setTimeout(() => done("red"), 500)));
    const [first, second] = [window(), window()];
    const all = Promise.all([first, first, second, second].map((each) => each.answer(CALL, { paint })));
    await vi.advanceTimersByTimeAsync(3000);
    const taken = "RECEIPT_STATUS_ACCEPTED";
    expect((await all).map((receipt) => receipt?.status)).toEqual([taken, taken, undefined, undefined]);
    expect([paint.mock.calls.length, told()]).toEqual([1, [["red", false]]]);
    expect(await first.answer(CALL, { paint })).toBeUndefined();
  });

  it.each([
    ["runs it", "EFFECT_CLASS_IDEMPOTENT", 1, ["blue", false]],
    ["reports an unknown outcome if it is not safe to repeat", "EFFECT_CLASS_AT_MOST_ONCE", 0, [{ error: expect.stringContaining("unknown whether it took effect") }, true]],
  ] as const)("whose window fails to bring its result has a next one, which %s", async (_, effectClass, times, last) => {
    const { window, told } = gateway({ ...CALL, effectClass }, [new Response("{}", { status: 401 })]);
    await expect(window().answer(CALL, { paint: () => "red" })).rejects.toThrow("401");
    const paint = vi.fn(() => "blue");
    const answered = window().answer(CALL, { paint });
    await vi.advanceTimersByTimeAsync(29_000);
    expect(told()).toEqual([["red", false]]);
    await vi.advanceTimersByTimeAsync(5000);
    await answered;
    expect([paint.mock.calls.length, told()]).toEqual([times, [["red", false], last]]);
  });

  it("renews its lease while the function runs", async () => {
    const { window, told } = gateway();
    const slow = window().answer(CALL, { paint: () => new Promise((done) => setTimeout(() => done("red"), 100_000)) });
    const other = window().answer(CALL, { paint: () => "blue" });
    await vi.advanceTimersByTimeAsync(103_000);
    expect([(await slow)?.status, await other, told()]).toEqual(["RECEIPT_STATUS_ACCEPTED", undefined, [["red", false]]]);
  });

  it("submits its result under the next lease when the first has expired", async () => {
    const { window, told } = gateway(CALL, [{ status: "RECEIPT_STATUS_WRONG_HOLDER" }]);
    const paint = vi.fn(() => "red");
    expect((await window().answer(CALL, { paint }))?.status).toBe("RECEIPT_STATUS_ACCEPTED");
    expect([paint.mock.calls.length, told()]).toEqual([1, [["red", false], ["red", false]]]);
  });

  it("does not run again when a submit fails; the same result is retried", async () => {
    const { window, submitted } = gateway(CALL, [new TypeError("refused"), new Response("", { status: 503 })]);
    const paint = vi.fn(() => "red");
    const answered = window().answer(CALL, { paint });
    await vi.advanceTimersByTimeAsync(2100);
    expect((await answered)?.status).toBe("RECEIPT_STATUS_ACCEPTED");
    expect([paint.mock.calls.length, new Set(submitted.map(({ requestId }) => requestId)).size]).toEqual([1, 1]);
  });

  it("fails if its result is refused, so that the model continues", async () => {
    const { window, told } = gateway(CALL, [{ status: "RECEIPT_STATUS_REFUSED", message: "Too deep." }]);
    await window().answer(CALL, { paint: () => "deep" });
    expect(told()[1]).toEqual([{ error: "The result was refused: Too deep." }, true]);
  });

  it("waits until the page is visible, unless whileHidden is set", async () => {
    const page = { hidden: true };
    vi.stubGlobal("document", page);
    const { window, told } = gateway();
    const answered = window().answer(CALL, { paint: () => "red" });
    await vi.advanceTimersByTimeAsync(60_000);
    expect(told()).toEqual([]);
    page.hidden = false;
    await vi.advanceTimersByTimeAsync(500);
    await answered;
    expect(told()).toEqual([["red", false]]);
    page.hidden = true;
    const other = gateway();
    await other.window().answer(CALL, { paint: () => "red" }, { whileHidden: true });
    expect(other.told()).toEqual([["red", false]]);
  });

  it("is left to the client that holds its lease, as long as it renews the lease", async () => {
    const expireTime = new Date(Date.now() + 8000).toISOString();
    const { window, told } = gateway({ ...CALL, offer: { clientId: "desk", expireTime } });
    const answered = window().answer(CALL, { paint: () => "red" });
    await vi.advanceTimersByTimeAsync(7900);
    expect(told()).toEqual([]);
    await vi.advanceTimersByTimeAsync(6000);
    await answered;
    expect(told()).toEqual([["red", false]]);
  });
});
