import type { AgentService, CallJson, LeaseCallResponseJson, ReceiptJson } from "../gen/index.js";
import { pause, PawlError, persist } from "./errors.js";
import { decode, encode, requestId } from "./json.js";
import type { Service } from "./transport.js";

/** The function of a front-end tool: takes the arguments, and returns the result or throws. */
export type FrontEndTool = (args: any, call: CallJson) => unknown;

export interface AnswerOptions {
  /** True to run it in a hidden page; otherwise it waits until the page is visible. */
  whileHidden?: boolean;
  signal?: AbortSignal;
}

/** Runs calls in this program, each once. */
export class Answers {
  readonly #agent: Service<typeof AgentService>;
  readonly #clientId = requestId();
  readonly #running = new Map<string, Promise<ReceiptJson | undefined>>();

  constructor(agent: Service<typeof AgentService>) {
    this.#agent = agent;
  }

  answer(call: CallJson, tools: Record<string, FrontEndTool>, options: AnswerOptions): Promise<ReceiptJson | undefined> {
    const id = call.callId ?? "";
    const running = this.#running.get(id) ?? this.#answer(call, tools, options).finally(() => this.#running.delete(id));
    this.#running.set(id, running);
    return running;
  }

  async #answer(call: CallJson, tools: Record<string, FrontEndTool>, options: AnswerOptions): Promise<ReceiptJson | undefined> {
    const { signal } = options;
    if (!options.whileHidden) await seen(signal);
    let result: Outcome | undefined;
    for (let refused = false; ; ) {
      const held = await this.#acquire(call, signal);
      if (!held) return undefined;
      result ??= await this.#run(held, tools);
      const receipt = await this.#submit(held, result, signal);
      // If the lease has expired, the same result is submitted under the next one.
      if (receipt?.status === "RECEIPT_STATUS_WRONG_HOLDER") continue;
      if (receipt?.status !== "RECEIPT_STATUS_REFUSED" || refused) return receipt;
      refused = true;
      result = failure(`The result was refused: ${receipt.message}`);
    }
  }

  /** Waits for the lease of a call; undefined if the call is settled. */
  async #acquire(call: CallJson, signal?: AbortSignal): Promise<LeaseCallResponseJson | undefined> {
    for (;;) {
      const answer = await persist(() => this.#lease(call), signal);
      if (answer.granted) return answer;
      if (answer.call?.state !== "CALL_STATE_OFFERED") return undefined;
      await pause(2000, signal);
    }
  }

  #lease({ runId = "", callId = "" }: CallJson): Promise<LeaseCallResponseJson> {
    return this.#agent.leaseCall({ runId, callId, clientId: this.#clientId });
  }

  /** Runs the function while renewing the lease; refuses if another window may have run it before. */
  async #run({ call = {}, leaseSeconds }: LeaseCallResponseJson, tools: Record<string, FrontEndTool>): Promise<Outcome> {
    if (Number(call.offer?.offerEpoch) > 1 && !REPEATABLE.has(call.effectClass ?? "")) return failure(UNKNOWN);
    const done = new AbortController();
    const renew = async (): Promise<never> => {
      for (;;) {
        await pause((Number(leaseSeconds) * 1000) / 3, done.signal);
        await persist(() => this.#lease(call), done.signal);
      }
    };
    renew().catch(() => {});
    return outcome(call, tools).finally(() => done.abort());
  }

  /** Submits the result, with retries. The function does not run again. */
  async #submit({ call = {} }: LeaseCallResponseJson, result: Outcome, signal?: AbortSignal): Promise<ReceiptJson | undefined> {
    const { runId = "", callId = "", offer } = call;
    const results = [{ callId, offerEpoch: offer?.offerEpoch ?? "0", ...result }];
    const request = { requestId: requestId(), runId, clientId: this.#clientId, results };
    try {
      return (await persist(() => this.#agent.submitToolResults(request), signal)).receipts?.[0];
    } catch (error) {
      if (error instanceof PawlError && error.reason === "TOO_LARGE") return { status: "RECEIPT_STATUS_REFUSED", message: error.message };
      throw error;
    }
  }
}

const REPEATABLE = new Set(["EFFECT_CLASS_READ_ONLY", "EFFECT_CLASS_IDEMPOTENT"]);
const UNKNOWN = "Another window started this call and disappeared, so it is unknown whether it took effect.";

type Outcome = { contentJson: string; isError: boolean };

/** Runs the function of a tool; returns its result, or an error for the model. */
async function outcome(call: CallJson, tools: Record<string, FrontEndTool>): Promise<Outcome> {
  const name = call.toolName ?? "";
  if (!Object.hasOwn(tools, name)) return failure(`This front end has no tool ${name}.`);
  try {
    return { contentJson: encode((await tools[name]!(decode(call.argumentsJson), call)) ?? null), isError: false };
  } catch (error) {
    return failure(error instanceof Error ? error.message : String(error));
  }
}

function failure(error: string): Outcome {
  return { contentJson: encode({ error }), isError: true };
}

async function seen(signal?: AbortSignal): Promise<void> {
  while (globalThis.document?.hidden) await pause(500, signal);
}
