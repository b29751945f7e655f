/** Makes hidden characters in untrusted text visible. Same rules as services/pawl-client/pawl/chassis/visible.py; tests/golden/visible.json tests both. */

const PICTURE = String.raw`\u2190-\u27bf\u2b00-\u2bff\u{1f000}-\u{1faff}`;
const JOINED = String.raw`[\u0620-\u08ff\u0900-\u109f]`;
const HIDDEN = new RegExp(
  String.raw`((?<=[${PICTURE}\ufe0f])\u200d(?=[${PICTURE}])|(?<=[${PICTURE}\u00a9\u00ae\u2122])\ufe0f|(?<=${JOINED})[\u200c\u200d](?=${JOINED}))|` +
    String.raw`[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2` +
    String.raw`\u115f\u1160\u17b4\u17b5\u180b-\u180f` +
    String.raw`\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb` +
    String.raw`\u{110bd}\u{110cd}\u{13430}-\u{1343f}\u{1bca0}-\u{1bca3}\u{1d173}-\u{1d17a}\u{e0000}-\u{e0fff}]`,
  "gu",
);
const HOST = /(?:(?<=\/\/)|(?<=@))[^\s/?#@:"'<>()[\]{},;\\]+/gu;
const ASCII = /^[\x00-\x7f]*$/;

/** Shows hidden characters as <U+202E>, and adds the ASCII name to hosts that are not ASCII. Keeps tabs and line breaks. */
export function visible(text: string): string {
  const mark = (hidden: string): string => `<U+${hidden.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}>`;
  const shown = text.replaceAll("\r\n", "\n").replace(HIDDEN, (hidden, seen: string | undefined) => seen ?? mark(hidden));
  return ASCII.test(shown) ? shown : shown.replace(HOST, (host, at: number) => host + asciiName(host, shown.slice(at + host.length, at + host.length + 5)));
}

function asciiName(host: string, after: string): string {
  if (ASCII.test(host) || !host.includes(".") || after === "<xn--") return "";
  try {
    return `<${new URL(`https://${host}`).hostname}>`;
  } catch {
    return "<not a host>";
  }
}
