import type { AgentService, CallJson, ReceiptJson } from "../gen/index.js";
import { pause, PawlError, persist } from "./errors.js";
import { decode, encode, requestId } from "./json.js";
import type { Service } from "./transport.js";

/** Does one thing for a tool of the page: takes the arguments, and returns the result or throws. */
export type FrontEndTool = (args: any, call: CallJson) => unknown;

export interface AnswerOptions {
  /** True to run it in a page that is hidden, too; else it waits until the page is seen. */
  whileHidden?: boolean;
  signal?: AbortSignal;
}

/** Calls that are answered by this program, each once. */
export class Answers {
  readonly #agent: Service<typeof AgentService>;
  readonly #going = new Map<string, Promise<ReceiptJson | undefined>>();

  constructor(agent: Service<typeof AgentService>) {
    this.#agent = agent;
  }

  answer(call: CallJson, tools: Record<string, FrontEndTool>, options: AnswerOptions): Promise<ReceiptJson | undefined> {
    const id = call.callId ?? "";
    const going = this.#going.get(id) ?? this.#begin(call, tools, options).finally(() => this.#going.delete(id));
    this.#going.set(id, going);
    return going;
  }

  async #begin(call: CallJson, tools: Record<string, FrontEndTool>, options: AnswerOptions): Promise<ReceiptJson | undefined> {
    if (!options.whileHidden) await seen(options.signal);
    return alone(`pawl_${call.callId}`, options.signal, async () => {
      // It may have been answered while another window had the lock.
      const open = await this.#open(call, options.signal);
      return open && this.#run(open, tools, options.signal);
    });
  }

  /** Returns the call as it is now, once no client holds it under a lease; undefined if it is settled. */
  async #open(call: CallJson, signal?: AbortSignal): Promise<CallJson | undefined> {
    for (;;) {
      const { run } = await persist(() => this.#agent.getRun({ runId: call.runId ?? "" }), signal);
      const open = run?.pendingCalls?.find(({ callId, state }) => callId === call.callId && state === "CALL_STATE_OFFERED");
      const left = open?.offer?.clientId ? Date.parse(open.offer.expireTime ?? "") - Date.now() : 0;
      if (!(left > 0)) return open;
      await pause(Math.min(left, 5000) + 100, signal);
    }
  }

  async #run(call: CallJson, tools: Record<string, FrontEndTool>, signal?: AbortSignal): Promise<ReceiptJson | undefined> {
    const refused = (why = ""): Promise<ReceiptJson | undefined> =>
      this.#submit(call, failure(`The result was refused: ${why}`), signal);
    try {
      const receipt = await this.#submit(call, await outcome(call, tools), signal);
      return receipt?.status === "RECEIPT_STATUS_REFUSED" ? refused(receipt.message) : receipt;
    } catch (error) {
      if (error instanceof PawlError && error.reason === "TOO_LARGE") return refused(error.message);
      throw error;
    }
  }

  /** Submits what the model is told, again and again until it is taken: the function is not run twice for that. */
  async #submit(call: CallJson, told: Outcome, signal?: AbortSignal): Promise<ReceiptJson | undefined> {
    const { runId = "", callId = "" } = call;
    const request = { requestId: requestId(), runId, results: [{ runId, callId, ...told }] };
    return (await persist(() => this.#agent.submitToolResults(request), signal)).receipts?.[0];
  }
}

type Outcome = { contentJson: string; isError: boolean };

/** Returns what the function of a tool does, or why it does not, in words for the model. */
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
  const page = globalThis.document;
  while (page?.hidden) {
    signal?.throwIfAborted();
    await new Promise<void>((done) => {
      page.addEventListener("visibilitychange", () => done(), { once: true });
      signal?.addEventListener("abort", () => done(), { once: true });
    });
  }
}

/** Does something while no other window of this origin does it; where there are no locks, at once. */
function alone<T>(name: string, signal: AbortSignal | undefined, work: () => Promise<T>): Promise<T> {
  const locks = globalThis.navigator?.locks as LockManager | undefined;
  return locks ? (locks.request(name, signal ? { signal } : {}, work) as Promise<T>) : work();
}
