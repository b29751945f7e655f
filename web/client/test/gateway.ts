import { afterEach, beforeEach, vi } from "vitest";

import { Pawl } from "../src/index";

beforeEach(() => {
  vi.useFakeTimers();
  vi.spyOn(Math, "random").mockReturnValue(0.5);
});
afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
  vi.restoreAllMocks();
});

export type Answer = string | Response | Error | object;

/** A client whose gateway gives these answers in order and repeats the last one, with the requests it received. */
export function client(...answers: Answer[]): { pawl: Pawl; asked: any[] } {
  const asked: any[] = [];
  const fetch = async (_: unknown, request?: RequestInit): Promise<Response> => {
    asked.push(JSON.parse(request!.body as string));
    const answer = answers[Math.min(asked.length, answers.length) - 1]!;
    if (answer instanceof Error) throw answer;
    if (answer instanceof Response) return answer.clone();
    return typeof answer === "string" ? new Response(answer) : Response.json(answer);
  };
  return { pawl: new Pawl({ fetch }), asked };
}
