import { describe, expect, it, vi } from "vitest";

import { Pawl, type PawlError } from "../src/index";
import { type Answer, client } from "./gateway";

const END_WITH = (key: string, code: string) => `event: end\ndata: {"key":"${key}","error":{"code":"${code}"}}\n\n`;
const END = (key: string) => `event: end\ndata: {"key":"${key}"}\n\n`;
const ANY = { method: "m", request: () => ({}), message: () => {} };
const MESSAGE = (key: string) => `data: {"key":"${key}","message":{}}\n\n`;

describe("streams", () => {
  const cases: [string, Answer][] = [
    ["no gateway", new TypeError("refused")],
    ["a connection that ends immediately", ""],
    ["an unavailable service", END_WITH("s0", "unavailable")],
    ["too many streams of one user", END_WITH("s0", "resource_exhausted")],
    ["a proxy without a gateway", new Response("<html>", { status: 502 })],
    ["a gateway with too many connections", new Response("Service Unavailable", { status: 503 })],
  ];
  it.each(cases)("back off and never stop retrying: %s", async (_, answer) => {
    const { pawl, asked } = client(answer);
    const failed = vi.fn();
    pawl.streams.subscribe({ ...ANY, end: failed });
    await vi.advanceTimersByTimeAsync(60_000);
    expect(failed).not.toHaveBeenCalled();
    expect(asked.length > 10 && asked.length < 20).toBe(true);
  });

  it("reconnect immediately after a message", async () => {
    const { pawl, asked } = client("", "", "", "", MESSAGE("s0"), "");
    pawl.streams.subscribe(ANY);
    await vi.advanceTimersByTimeAsync(3_760);
    expect(asked.length).toBe(5);
    await vi.advanceTimersByTimeAsync(260);
    expect(asked.length).toBe(6);
  });

  it.each([
    ["at their end, and a connection without streams is not a lost one", END("s0"), undefined, [[true]]],
    ["with an error that does not pass", new Response('{"code":"unauthenticated"}', { status: 401 }), "unauthenticated", []],
  ])("end once: %s", async (_, answer, code, states) => {
    const { pawl, asked } = client(answer);
    const [ended, state] = [vi.fn<(error?: PawlError) => void>(), vi.fn()];
    pawl.streams.onState = state;
    pawl.streams.subscribe({ ...ANY, end: ended });
    await vi.advanceTimersByTimeAsync(60_000);
    expect(ended.mock.calls.map(([error]) => error?.code)).toEqual([code]);
    expect([state.mock.calls, asked.length]).toEqual([states, 1]);
  });

  it("are limited to sixteen; a further one starts when another ends", async () => {
    const { pawl, asked } = client(MESSAGE("s0") + END("s3"));
    for (let each = 0; each < 18; each++) pawl.streams.subscribe(ANY);
    await vi.advanceTimersByTimeAsync(300);
    const wished = asked.map(({ subscriptions }) => Object.keys(subscriptions));
    expect(wished.map((keys) => keys.length)).toEqual([16, 16]);
    expect(["s3", "s16"].map((key) => wished[1]!.includes(key))).toEqual([false, true]);
  });

  it("stay closed while paused, even if subscriptions change", async () => {
    const { pawl, asked } = client(MESSAGE("s0"));
    pawl.streams.pause();
    const leave = pawl.streams.subscribe(ANY);
    pawl.streams.subscribe(ANY);
    leave();
    await vi.advanceTimersByTimeAsync(60_000);
    expect(asked.length).toBe(0);
    pawl.streams.resume();
    await vi.advanceTimersByTimeAsync(11);
    expect(asked.length).toBe(1);
  });
});

it.each([true, false])("an expired session is renewed once if possible, and the calls are retried: %s", async (renews) => {
  const asked: string[] = [];
  const over = { code: "unauthenticated", details: [{ debug: { reason: "SESSION_EXPIRED" } }] };
  const fetch = async (url: unknown): Promise<Response> => {
    const isGood = asked.push(String(url).split("/").at(-1)!) > 2 && renews;
    return Response.json(isGood ? {} : over, { status: isGood ? 200 : 401 });
  };
  const { agent } = new Pawl({ fetch: fetch as typeof globalThis.fetch });
  const answers = await Promise.allSettled([agent.whoAmI({}), agent.whoAmI({})]);
  for (const answer of answers) expect(answer).toMatchObject(renews ? { value: {} } : { reason: { reason: "SESSION_EXPIRED" } });
  expect(asked).toEqual(["WhoAmI", "WhoAmI", "renew", ...(renews ? ["WhoAmI", "WhoAmI"] : [])]);
});
