import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import { type CallJson, decode, encode, type FrontEndTool, Pawl, type ReceiptJson } from "../src/index";

const CALL: CallJson = { runId: "r", callId: "c", toolName: "paint", state: "CALL_STATE_OFFERED", argumentsJson: encode({ hue: 7 }) };

/** A gateway that has one call, of which the first result counts, and everything that was submitted to it. */
function gateway(open: CallJson = CALL, answers: (Response | Error | ReceiptJson)[] = []) {
  const submitted: { requestId: string; content: unknown; isError: boolean }[] = [];
  let pending = [open];
  const fetch = async (url: unknown, request?: RequestInit): Promise<Response> => {
    if (!String(url).endsWith("/SubmitToolResults")) return Response.json({ run: { pendingCalls: pending } });
    const { requestId, results } = JSON.parse(request!.body as string);
    submitted.push({ requestId, content: decode(results[0].contentJson), isError: results[0].isError });
    const answer = answers.shift() ?? { status: pending.length ? "RECEIPT_STATUS_ACCEPTED" : "RECEIPT_STATUS_LATE" };
    if (answer instanceof Error) throw answer;
    if (answer instanceof Response) return answer;
    if (answer.status === "RECEIPT_STATUS_ACCEPTED") pending = [];
    return Response.json({ receipts: [answer] });
  };
  return { window: () => new Pawl({ fetch }), submitted, told: () => submitted.map(({ content, isError }) => [content, isError]) };
}

/** What browsers have: locks by name, over all windows. */
function locks(): { request: (name: string, options: object, work: () => Promise<unknown>) => Promise<unknown> } {
  const held = new Map<string, Promise<unknown>>();
  return {
    request: (name, _, work) => {
      const before = held.get(name) ?? Promise.resolve();
      const mine = before.then(work, work);
      held.set(name, mine.catch(() => {}));
      return mine;
    },
  };
}

beforeEach(() => {
  vi.useFakeTimers();
  vi.stubGlobal("navigator", { locks: locks() });
});
afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

describe("a call that is offered to a page", () => {
  const cases: [string, Record<string, FrontEndTool>, unknown, boolean][] = [
    ["returns what the function returns", { paint: ({ hue }) => ({ painted: hue }) }, { painted: 7 }, false],
    ["returns null for a function that returns nothing", { paint: () => {} }, null, false],
    ["fails with what is thrown", { paint: () => Promise.reject(new Error("no paint")) }, { error: "no paint" }, true],
    ["fails where the tool is unknown", { draw: () => 1 }, { error: "This front end has no tool paint." }, true],
    ["fails with what JSON cannot say", { paint: () => 1n }, { error: "Do not know how to serialize a BigInt" }, true],
  ];
  it.each(cases)("%s", async (_, tools, content, isError) => {
    const { window, told } = gateway();
    expect((await window().answer(CALL, tools))?.status).toBe("RECEIPT_STATUS_ACCEPTED");
    expect(told()).toEqual([[content, isError]]);
  });

  it("has no function from the prototype of the tools", async () => {
    const { window, told } = gateway({ ...CALL, toolName: "toString" });
    await window().answer({ ...CALL, toolName: "toString" }, {});
    expect(told()).toEqual([[{ error: "This front end has no tool toString." }, true]]);
  });

  it("is run in one of two windows that are seen, and once however often it is told", async () => {
    const { window, told } = gateway();
    const paint = vi.fn(() => new Promise((done) => setTimeout(() => done("red"), 500)));
    const [first, second] = [window(), window()];
    const all = Promise.all([first, first, second, second].map((each) => each.answer(CALL, { paint })));
    await vi.advanceTimersByTimeAsync(600);
    const taken = "RECEIPT_STATUS_ACCEPTED";
    expect((await all).map((receipt) => receipt?.status)).toEqual([taken, taken, undefined, undefined]);
    expect([paint.mock.calls.length, told()]).toEqual([1, [["red", false]]]);
    expect(await first.answer(CALL, { paint })).toBeUndefined();
  });

  it("is run by the next window when the one that runs it fails to bring its result", async () => {
    const { window, told } = gateway(CALL, [new Response("{}", { status: 401 })]);
    const [first, second] = [window(), window()];
    await expect(first.answer(CALL, { paint: () => "red" })).rejects.toThrow("401");
    await second.answer(CALL, { paint: () => "blue" });
    expect(told()).toEqual([["red", false], ["blue", false]]);
  });

  it("is not run again for a result that is not taken at once: the same one is sent again", async () => {
    const { window, submitted } = gateway(CALL, [new TypeError("refused"), new Response("", { status: 503 })]);
    const paint = vi.fn(() => "red");
    const answered = window().answer(CALL, { paint });
    await vi.advanceTimersByTimeAsync(2100);
    expect((await answered)?.status).toBe("RECEIPT_STATUS_ACCEPTED");
    expect(paint).toHaveBeenCalledOnce();
    expect(new Set(submitted.map(({ requestId }) => requestId)).size).toBe(1);
  });

  it("fails if its result is refused, so that the model goes on", async () => {
    const { window, told } = gateway(CALL, [{ status: "RECEIPT_STATUS_REFUSED", message: "Too deep." }]);
    await window().answer(CALL, { paint: () => "deep" });
    expect(told()[1]).toEqual([{ error: "The result was refused: Too deep." }, true]);
  });

  it("waits until the page is seen, unless that does not matter", async () => {
    const page = Object.assign(new EventTarget(), { hidden: true });
    vi.stubGlobal("document", page);
    const { window, told } = gateway();
    const answered = window().answer(CALL, { paint: () => "red" });
    await vi.advanceTimersByTimeAsync(60_000);
    expect(told()).toEqual([]);
    page.hidden = false;
    page.dispatchEvent(new Event("visibilitychange"));
    await answered;
    expect(told()).toEqual([["red", false]]);
    page.hidden = true;
    const other = gateway();
    await other.window().answer(CALL, { paint: () => "red" }, { whileHidden: true });
    expect(other.told()).toEqual([["red", false]]);
  });

  it("is left to the client that holds it, as long as that shows signs of life", async () => {
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
