import type { ErrorReasonJson } from "../gen/index.js";

/** Machine-readable error reasons, such as `RUN_NOT_FOUND`. A newer suite may have more. */
export type Reason = Known<ErrorReasonJson> | (string & {});
type Known<R> = R extends `ERROR_REASON_${infer Name}` ? Name : never;

/** An error from Pawl or from the network. */
export class PawlError extends Error {
  override readonly name = "PawlError";

  /**
   * `code` is the gRPC code: `not_found`, `unauthenticated`, `unavailable` ... `reason` is empty if no service answered.
   * `metadata` has the values that belong to the reason.
   */
  constructor(readonly code: string, message: string, readonly reason: Reason = "", readonly metadata: Readonly<Record<string, string>> = {}) {
    super(message);
  }

  /** True if the request can be retried: it changed nothing, or its `requestId` makes a retry safe. */
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

// A proxy sends only a status. The Connect protocol maps it to these codes.
const CODES: Readonly<Record<number, string>> = {
  400: "internal", 401: "unauthenticated", 403: "permission_denied", 404: "unimplemented",
  429: "unavailable", 502: "unavailable", 503: "unavailable", 504: "unavailable",
};

/** Returns the error in a body; without one, an error for the status. */
export function errorOf(body: ErrorBody | undefined, fallback: string, status = 0): PawlError {
  const debug = body?.details?.[0]?.debug;
  return new PawlError(body?.code ?? CODES[status] ?? "unknown", body?.message ?? fallback, debug?.reason, debug?.metadata);
}

const PAUSES_MS = [250, 500, 1000, 2000, 5000];

/** Returns the backoff before a retry, in milliseconds. */
export function pauseMs(failures: number): number {
  return PAUSES_MS[Math.min(failures, PAUSES_MS.length) - 1]! * (0.5 + Math.random());
}

/** Retries `work` while its error is temporary. */
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

/** Waits; throws the reason of an aborted signal. */
export async function pause(ms: number, signal?: AbortSignal): Promise<void> {
  signal?.throwIfAborted();
  await new Promise<void>((done) => {
    const timer = setTimeout(done, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });
  signal?.throwIfAborted();
}
