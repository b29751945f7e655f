/** An error that Pawl reports, or the network. */
export class PawlError extends Error {
  /** The kind, as gRPC names it: `not_found`, `unauthenticated`, `unavailable` ... */
  readonly code: string;
  /** What programs branch on: `RUN_NOT_FOUND`, `DIGEST_MISMATCH` ...; empty where nobody answered. */
  readonly reason: string;
  /** The values that the reason promises. */
  readonly metadata: Readonly<Record<string, string>>;

  constructor(code: string, message: string, reason = "", metadata: Record<string, string> = {}) {
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
  400: "internal",
  401: "unauthenticated",
  403: "permission_denied",
  404: "unimplemented",
  429: "unavailable",
  502: "unavailable",
  503: "unavailable",
  504: "unavailable",
};

/** Returns the error that a body describes, or else the status that it came with. */
export function errorOf(body: ErrorBody | undefined, fallback: string, status = 0): PawlError {
  const debug = body?.details?.[0]?.debug;
  return new PawlError(body?.code ?? CODES[status] ?? "unknown", body?.message ?? fallback, debug?.reason, debug?.metadata);
}
