import type { DescMessage, MessageJsonType } from "@bufbuild/protobuf";
import type { GenService } from "@bufbuild/protobuf/codegenv2";

import { type ErrorBody, errorOf, PawlError, persist } from "./errors.js";

/** The methods of a service that answer once, by name, with requests and responses in the JSON of protobuf. */
export type Service<S> =
  S extends GenService<infer M>
    ? {
        [K in keyof M as M[K]["methodKind"] extends "unary" ? K : never]: (
          request?: Json<M[K]["input"]>,
          options?: CallOptions,
        ) => Promise<Json<M[K]["output"]>>;
      }
    : never;
type Json<D extends DescMessage> = MessageJsonType<D>;

export interface CallOptions {
  signal?: AbortSignal;
  /** Milliseconds; 15,000 if not said, and at most 60,000. */
  timeoutMs?: number;
}

export interface Options {
  /** The address of a gateway; that of the page if not said. */
  baseUrl?: string;
  /** The key of the caller; without it the session of the browser. */
  key?: string;
  /** On whose behalf to call, for keys that may choose. */
  store?: string;
  user?: string;
  fetch?: typeof fetch;
}

/** So often a request is sent again that brings no answer, as its gateway may be another one then, if twice is as good as once. */
const AGAIN_MAX = 4;
const READS = /^(get|list|whoAmI)/;
/** Has its effect once, too, but only its first answer has the secret. */
const TELLS_ONCE = "createChannel";

/** Sends requests to a gateway. */
export class Transport {
  readonly baseUrl: string;
  readonly #headers: Record<string, string>;
  readonly #fetch: typeof fetch;
  #renewing: Promise<boolean> | undefined;

  constructor(options: Options = {}) {
    this.baseUrl = (options.baseUrl ?? "").replace(/\/$/, "");
    this.#headers = {
      "content-type": "application/json",
      ...(options.key ? { authorization: `Bearer ${options.key}` } : {}),
      ...(options.store ? { "pawl-store": options.store } : {}),
      ...(options.user ? { "pawl-user": options.user } : {}),
    };
    this.#fetch = options.fetch ?? globalThis.fetch.bind(globalThis);
  }

  /** Posts JSON; throws PawlError for every answer that is no success. A session that can go on is renewed meanwhile. */
  async post(path: string, body: unknown, headers: Record<string, string> = {}, signal?: AbortSignal): Promise<Response> {
    try {
      return await this.#post(path, body, headers, signal);
    } catch (error) {
      if (!(error instanceof PawlError && error.reason === "SESSION_EXPIRED" && (await this.#renew()))) throw error;
      return this.#post(path, body, headers, signal);
    }
  }

  /** Gets the next token of an identity provider, once for all calls; one tab after the other: a provider may give it only once. */
  #renew(): Promise<boolean> {
    const renew = () => this.#post("/login/renew", {}, {}).then(() => true, () => false);
    // A browser can refuse a lock: that fails these calls, and no later ones.
    const begin = () => (globalThis.navigator?.locks?.request("pawl.renew", renew) ?? renew()).catch(() => false);
    return (this.#renewing ??= begin().finally(() => (this.#renewing = undefined)));
  }

  async #post(path: string, body: unknown, headers: Record<string, string>, signal?: AbortSignal): Promise<Response> {
    const init = { method: "POST", headers: { ...this.#headers, ...headers }, body: JSON.stringify(body), signal: signal ?? null };
    let response: Response;
    try {
      response = await this.#fetch(`${this.baseUrl}${path}`, { ...init, credentials: "same-origin" });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new PawlError("unavailable", "The gateway does not answer. Is it running, and is this machine online?");
    }
    if (response.ok) return response;
    const said = (await response.json().catch(() => undefined)) as ErrorBody | undefined;
    throw errorOf(said, `The gateway answered ${response.status}.`, response.status);
  }

  /** Returns the methods of a service: `service<typeof AgentService>("pawl.agent.v1.AgentService").getRun({runId})`. */
  service<S>(name: string): Service<S> {
    const call = (method: string) => async (asked: { requestId?: string } = {}, options: CallOptions = {}) => {
      // As it is now, whatever becomes of it between two attempts.
      const request = JSON.parse(JSON.stringify(asked));
      const path = `/rpc/${name}/${method[0]!.toUpperCase()}${method.slice(1)}`;
      const timeout = { "connect-timeout-ms": String(options.timeoutMs ?? 15_000) };
      const send = async (): Promise<unknown> => {
        const answer = await this.post(path, request, timeout, options.signal);
        const failure = () => (options.signal?.aborted ? options.signal.reason : new PawlError("unavailable", "The answer broke off."));
        return answer.json().catch(() => Promise.reject(failure()));
      };
      const most = READS.test(method) || (request.requestId && method !== TELLS_ONCE) ? AGAIN_MAX : 0;
      return persist(send, options.signal, ({ code }, failures) => code === "unavailable" && failures <= most);
    };
    return new Proxy({}, { get: (_, method) => (typeof method === "string" ? call(method) : undefined) }) as Service<S>;
  }
}
