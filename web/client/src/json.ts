/** Returns a fresh id for a request, which may be sent again as it is. */
export function requestId(): string {
  return `web_${crypto.randomUUID().replaceAll("-", "")}`;
}

/** Returns the value of bytes that are JSON; undefined if there are none. `parse` may read numbers that JSON.parse rounds. */
export function decode(bytes: string | undefined, parse: (text: string) => any = (text) => JSON.parse(text)): any {
  if (!bytes) return undefined;
  return parse(new TextDecoder().decode(Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0))));
}

/** Returns a value as bytes that are JSON. */
export function encode(value: unknown): string {
  const bytes = new TextEncoder().encode(JSON.stringify(value));
  let letters = "";
  // As many at once as any engine takes as arguments.
  for (let place = 0; place < bytes.length; place += 8192)
    letters += String.fromCharCode(...bytes.subarray(place, place + 8192));
  return btoa(letters);
}
