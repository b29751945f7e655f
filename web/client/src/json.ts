/** Returns a new request id. A request with an id can be retried safely. */
export function requestId(): string {
  return `web_${crypto.randomUUID().replaceAll("-", "")}`;
}

/** Decodes a bytes field with JSON; undefined if it is empty. `parse` can preserve integers that JSON.parse rounds. */
export function decode(bytes: string | undefined, parse: (text: string) => any = (text) => JSON.parse(text)): any {
  if (!bytes) return undefined;
  return parse(new TextDecoder().decode(Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0))));
}

/** Encodes a value as JSON for a bytes field. */
export function encode(value: unknown): string {
  const bytes = new TextEncoder().encode(JSON.stringify(value));
  let letters = "";
  // Engines limit the number of arguments.
  for (let at = 0; at < bytes.length; at += 8192)
    letters += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return btoa(letters);
}
