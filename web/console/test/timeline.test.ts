import { expect, it } from "vitest";

import { lay, NO_BARS } from "../src/timeline";
import type { RunEventJson } from "@pawl/client";

const time = (second: number): string => new Date(1_000_000 + second * 1000).toISOString();
const state = (name: string): RunEventJson => ({ runChanged: { run: { state: name as never } } });
const call = (name: string): RunEventJson => ({ callChanged: { call: { callId: "c", toolName: "add", state: name as never } } });

/** The bars of events one second apart, each with the attempt of its worker. */
function laid(...all: [RunEventJson, string][]): string[] {
  const events = all.map(([event, attempt], index) => ({ ...event, attempt, seq: String(index + 1), time: time(index) }));
  const { bars } = events.reduce((before, event) => lay(before, [event]), NO_BARS);
  return bars.map((bar) => `${bar.kind} ${bar.name} ${(bar.start - 1_000_000) / 1000}-${bar.end === undefined ? "" : (bar.end - 1_000_000) / 1000}`);
}

it("has one bar per call, regardless of the number of events", () => {
  expect(laid([call("CALL_STATE_PROPOSED"), "1"], [call("CALL_STATE_RUNNING"), "1"], [call("CALL_STATE_SUCCEEDED"), "1"])).toEqual(["call add 0-2"]);
});

it.each([
  ["CALL_STATE_SUCCEEDED", false],
  ["CALL_STATE_FAILED", true],
  ["CALL_STATE_OUTCOME_UNKNOWN", true],
])("marks failed calls: %s", (name, bad) => {
  const event = { ...call(name), seq: "1", time: time(0) };
  expect(lay(NO_BARS, [event]).bars.map((bar) => bar.bad)).toEqual([bad]);
});

it("splits a call into its waits and attempts, below its round", () => {
  const tried = (name: string, attempt: number): RunEventJson => ({ callChanged: { call: { callId: "c", toolName: "add", state: name as never, attempt } } });
  const all = [{ roundStarted: { round: 1 } }, tried("CALL_STATE_AWAITING_APPROVAL", 1), tried("CALL_STATE_RUNNING", 1), tried("CALL_STATE_RUNNING", 2), tried("CALL_STATE_SUCCEEDED", 2)];
  const { bars } = all.reduce((before, event, index) => lay(before, [{ ...event, seq: `${index}`, time: time(index) }]), NO_BARS);
  expect(bars.map(({ depth }) => depth)).toEqual([0, 1]);
  expect(bars[1]?.parts?.map(({ kind, start, end = 0 }) => `${kind} ${(end - start) / 1000}`)).toEqual(["wait 1", "bad 1", "run 1"]);
});

it("ends a wait when the run continues, which is not a takeover", () => {
  const bars = laid([state("RUN_STATE_RUNNING"), "1"], [state("RUN_STATE_WAITING"), "1"], [state("RUN_STATE_RUNNING"), "2"]);
  expect(bars).toEqual(["wait Waiting 1-2"]);
});

it("shows a takeover, and closes open bars when the run ends", () => {
  const begun: RunEventJson = { roundStarted: { round: 1 } };
  expect(laid([begun, "1"], [call("CALL_STATE_RUNNING"), "2"], [state("RUN_STATE_COMPLETED"), "2"])).toEqual([
    "round Round 1 0-2",
    "takeover Taken over 1-1",
    "call add 1-2",
  ]);
});
