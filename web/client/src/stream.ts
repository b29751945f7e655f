import { type ErrorBody, errorOf, pauseMs, PawlError } from "./errors.js";
import type { Transport } from "./transport.js";

/** A subscription to a server-streaming method. */
export interface Subscription<M> {
  method: string;
  /** Returns the request at the current position. Called again after each reconnect. */
  request: () => object;
  message: (message: M) => void;
  /** Called once at the end of the stream, with an error if it failed. */
  end?: (error?: PawlError) => void;
}

interface Line {
  key: string;
  message?: unknown;
  error?: ErrorBody;
}

/** Limit of the gateway per connection. Further streams wait until another one ends. */
const WATCHED_MAX = 16;

/**
 * All streams of a page in one connection, which reconnects automatically.
 *
 * Subscriptions that change at about the same time cause one reconnect. A connection that is lost, or silent for 45 s, is
 * reopened at the position of each stream. No message is lost, but one may repeat.
 */
export class Streams {
  /** Called when the connection opens (true) or is lost (false). */
  onState: (connected: boolean) => void = () => {};
  readonly #transport: Transport;
  /** With the number of failures since the last message. */
  readonly #subscriptions = new Map<string, Subscription<any> & { failures: number }>();
  #controller: AbortController | undefined;
  #changing: ReturnType<typeof setTimeout> | undefined;
  #paused = false;
  #next = 0;

  constructor(transport: Transport) {
    this.#transport = transport;
  }

  /** Subscribes; returns a function that unsubscribes. */
  subscribe<M>(subscription: Subscription<M>): () => void {
    const key = `s${this.#next++}`;
    this.#subscriptions.set(key, { ...subscription, failures: 0 });
    this.#change();
    return () => void (this.#subscriptions.delete(key) && this.#change());
  }

  /** Closes the connection, for a hidden page; `resume` reopens it. */
  pause(): void {
    this.#paused = true;
    clearTimeout(this.#changing);
    this.#controller?.abort();
    this.#controller = undefined;
  }

  resume(): void {
    this.#paused = false;
    if (!this.#controller) this.#change();
  }

  #change(pauseMs = 10): void {
    if (this.#paused) return;
    clearTimeout(this.#changing);
    this.#changing = setTimeout(() => void this.#connect(), pauseMs);
  }

  /** Reconnects with a backoff after a failure of `these`. */
  #changeLater(these: Iterable<{ failures: number }>): void {
    for (const each of these) each.failures++;
    const failures = Math.max(1, ...[...this.#subscriptions.values()].map((each) => each.failures));
    this.#change(pauseMs(failures));
  }

  async #connect(): Promise<void> {
    this.#controller?.abort();
    if (!this.#subscriptions.size) return void (this.#controller = undefined);
    const controller = (this.#controller = new AbortController());
    try {
      await this.#read(controller);
      if (this.#controller === controller && !this.#subscriptions.size) return;
    } catch (error) {
      if (controller.signal.aborted && this.#controller !== controller) return;
      if (error instanceof PawlError && !isTemporary(error)) {
        const all = [...this.#subscriptions.values()];
        this.#subscriptions.clear();
        for (const subscription of all) subscription.end?.(error);
        return;
      }
    }
    if (this.#controller !== controller) return;
    this.onState(false);
    this.#changeLater(this.#subscriptions.values());
  }

  async #read(controller: AbortController): Promise<void> {
    const watched = [...this.#subscriptions].slice(0, WATCHED_MAX);
    const requested = Object.fromEntries(watched.map(([key, { method, request }]) => [key, { method, request: request() }]));
    let watchdog = setTimeout(() => controller.abort(), 45_000);
    try {
      const response = await this.#transport.post("/stream", { subscriptions: requested }, {}, controller.signal);
      this.onState(true);
      for await (const [name, data] of events(response.body!)) {
        clearTimeout(watchdog);
        watchdog = setTimeout(() => controller.abort(), 45_000);
        if (this.#controller !== controller) return;
        if (data) this.#take(name, JSON.parse(data) as Line);
      }
    } finally {
      clearTimeout(watchdog);
    }
  }

  #take(name: string, line: Line): void {
    const subscription = this.#subscriptions.get(line.key);
    if (!subscription) return;
    if (name !== "end") {
      subscription.failures = 0;
      subscription.message(line.message);
      return;
    }
    const error = line.error && errorOf(line.error, "The stream ended.");
    // A temporary failure, or a session that the next request renews. The other streams continue until all are requested again.
    if (error && (isTemporary(error) || error.reason === "SESSION_EXPIRED")) return this.#changeLater([subscription]);
    this.#subscriptions.delete(line.key);
    if (this.#subscriptions.size >= WATCHED_MAX) this.#change();
    subscription.end?.(error);
  }
}

/** True if a later attempt may succeed, for example when fewer streams are open. */
function isTemporary(error: PawlError): boolean {
  return error.again || error.code === "resource_exhausted";
}

/** Yields name and data (one line) of each server-sent event; a comment has neither. U+2028 is not a line break. */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<[name: string, data: string]> {
  const reader = body.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop()!;
      for (const block of blocks) yield [/(?:^|\n)event: ([^\n]*)/.exec(block)?.[1] ?? "", /(?:^|\n)data: ([^\n]*)/.exec(block)?.[1] ?? ""];
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
