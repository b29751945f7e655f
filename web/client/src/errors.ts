import type { ErrorReasonJson } from "../gen/index.js";

/** What programs branch on: `RUN_NOT_FOUND`, `DIGEST_MISMATCH` ... A newer suite may have more of them. */
export type Reason = Known<ErrorReasonJson> | (string & {});
type Known<R> = R extends `ERROR_REASON_${infer Name}` ? Name : never;

/** An error that Pawl reports, or the network. */
export class PawlError extends Error {
  /** The kind, as gRPC names it: `not_found`, `unauthenticated`, `unavailable` ... */
  readonly code: string;
  /** Empty where nobody answered. */
  readonly reason: Reason;
  /** The values that the reason promises. */
  readonly metadata: Readonly<Record<string, string>>;

  constructor(code: string, message: string, reason: Reason = "", metadata: Record<string, string> = {}) {
    super(message);
    this.name = "PawlError";
    this.code = code;
    this.reason = reason;
    this.metadata = metadata;
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

/** Does something again while its error is one that passes; not after so many milliseconds. */
export async function persist<T>(work: () => Promise<T>, signal?: AbortSignal, most = Infinity): Promise<T> {
  for (const begin = Date.now(); ; ) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof PawlError && error.again) || Date.now() - begin >= most) throw error;
      await pause(1000, signal);
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
