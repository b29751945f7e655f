import type { DescMessage, MessageJsonType } from "@bufbuild/protobuf";
import type { GenService } from "@bufbuild/protobuf/codegenv2";

import { type ErrorBody, errorOf, PawlError, persist } from "./errors.js";

/** The unary methods of a service, with requests and responses as protobuf JSON. */
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
  /** Milliseconds. Default: 15,000, maximum: 60,000. */
  timeoutMs?: number;
}

export interface Options {
  /** The URL of a gateway. Default: the origin of the page. */
  baseUrl?: string;
  /** An API key. Default: the session of the browser. */
  key?: string;
  /** The identity to act for, if the key allows it. */
  store?: string;
  user?: string;
  fetch?: typeof fetch;
}

/** Retries of a request without an answer, if it is safe to repeat. A retry may reach another gateway. */
const RETRIES_MAX = 4;
const READS = /^(get|list|whoAmI)/;
/** Safe to repeat, but only the first response has the secret. */
const SECRET_ONCE = "createChannel";

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

  /** Posts JSON; throws PawlError unless the response is a success. Renews an expired session if possible. */
  async post(path: string, body: unknown, headers: Record<string, string> = {}, signal?: AbortSignal): Promise<Response> {
    try {
      return await this.#post(path, body, headers, signal);
    } catch (error) {
      if (!(error instanceof PawlError && error.reason === "SESSION_EXPIRED" && (await this.#renew()))) throw error;
      return this.#post(path, body, headers, signal);
    }
  }

  /** Renews the session, once for all calls. Tabs take turns, because a provider may accept a refresh token only once. */
  #renew(): Promise<boolean> {
    const renew = () => this.#post("/login/renew", {}, {}).then(() => true, () => false);
    // A browser can refuse a lock; only these calls fail then.
    const locked = () => (globalThis.navigator?.locks?.request("pawl.renew", renew) ?? renew()).catch(() => false);
    return (this.#renewing ??= locked().finally(() => (this.#renewing = undefined)));
  }

  async #post(path: string, body: unknown, headers: Record<string, string>, signal?: AbortSignal): Promise<Response> {
    const init = { method: "POST", headers: { ...this.#headers, ...headers }, body: JSON.stringify(body), signal: signal ?? null };
    let response: Response;
    try {
      response = await this.#fetch(`${this.baseUrl}${path}`, { ...init, credentials: "same-origin" });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new PawlError("unavailable", "The gateway is not responding. Check that it is running and that this machine is online.");
    }
    if (response.ok) return response;
    const error = (await response.json().catch(() => undefined)) as ErrorBody | undefined;
    throw errorOf(error, `The gateway responded with status ${response.status}.`, response.status);
  }

  /** Returns the methods of a service: `service<typeof AgentService>("pawl.agent.v1.AgentService").getRun({runId})`. */
  service<S>(name: string): Service<S> {
    const call = (method: string) => async (given: { requestId?: string } = {}, options: CallOptions = {}) => {
      // A copy, because the caller may change it between attempts.
      const request = JSON.parse(JSON.stringify(given));
      const path = `/rpc/${name}/${method[0]!.toUpperCase()}${method.slice(1)}`;
      const timeout = { "connect-timeout-ms": String(options.timeoutMs ?? 15_000) };
      const send = async (): Promise<unknown> => {
        const answer = await this.post(path, request, timeout, options.signal);
        const failure = () => (options.signal?.aborted ? options.signal.reason : new PawlError("unavailable", "The response was interrupted."));
        return answer.json().catch(() => Promise.reject(failure()));
      };
      const most = READS.test(method) || (request.requestId && method !== SECRET_ONCE) ? RETRIES_MAX : 0;
      return persist(send, options.signal, ({ code }, failures) => code === "unavailable" && failures <= most);
    };
    return new Proxy({}, { get: (_, method) => (typeof method === "string" ? call(method) : undefined) }) as Service<S>;
  }
}
