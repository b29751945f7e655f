import type { ErrorReasonJson } from "../gen/index.js";

/** What programs branch on: `RUN_NOT_FOUND`, `DIGEST_MISMATCH` ... A newer suite may have more of them. */
export type Reason = Known<ErrorReasonJson> | (string & {});
type Known<R> = R extends `ERROR_REASON_${infer Name}` ? Name : never;

/** An error that Pawl reports, or the network. */
export class PawlError extends Error {
  override readonly name = "PawlError";

  /**
   * `code` is the kind, as gRPC names it: `not_found`, `unauthenticated`, `unavailable` ...; `reason` is empty where nobody
   * answered; `metadata` has the values that it promises.
   */
  constructor(readonly code: string, message: string, readonly reason: Reason = "", readonly metadata: Readonly<Record<string, string>> = {}) {
    super(message);
  }

  /** True if the same request may be sent again, later: nothing was changed, or its `requestId` makes it safe. */
  get again(): boolean {
    return this.code === "unavailable" || this.code === "deadline_exceeded";
  }
}

/** An error in the form of the Connect protocol. */
export interface ErrorBody {
  code?: string;
  message?: string;
  details?: { debug?: { reason?: string; metadata?: Record<string, string> } }[];
}

// What stands between says only a status; the Connect protocol has these codes for it.
const CODES: Readonly<Record<number, string>> = {
  400: "internal", 401: "unauthenticated", 403: "permission_denied", 404: "unimplemented",
  429: "unavailable", 502: "unavailable", 503: "unavailable", 504: "unavailable",
};

/** Returns the error that a body describes, or else the status that it came with. */
export function errorOf(body: ErrorBody | undefined, fallback: string, status = 0): PawlError {
  const debug = body?.details?.[0]?.debug;
  return new PawlError(body?.code ?? CODES[status] ?? "unknown", body?.message ?? fallback, debug?.reason, debug?.metadata);
}

const PAUSES_MS = [250, 500, 1000, 2000, 5000];

/** Returns a pause before something is tried again, in milliseconds: the longer the more often it has failed. */
export function pauseMs(failures: number): number {
  return PAUSES_MS[Math.min(failures, PAUSES_MS.length) - 1]! * (0.5 + Math.random());
}

/** Does something again while its error is one that passes. */
export async function persist<T>(work: () => Promise<T>, signal?: AbortSignal, passes = ({ again }: PawlError, _failures: number) => again): Promise<T> {
  for (let failures = 1; ; failures++) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof PawlError && passes(error, failures))) throw error;
      await pause(pauseMs(failures), signal);
    }
  }
}

/** Waits; throws the reason of a signal that is aborted. */
export async function pause(ms: number, signal?: AbortSignal): Promise<void> {
  signal?.throwIfAborted();
  await new Promise<void>((done) => {
    const timer = setTimeout(done, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });
  signal?.throwIfAborted();
}
