/** JSON for display and editing. Integers beyond the precision of a number keep their digits. */

import { decode, encode } from "@pawl/client";

export const BIG = /^-?[1-9]\d{15,}$/;

/** Parses JSON. Large integers keep their digits if the browser supports JSON.rawJSON. */
export function parse(text: string): any {
  const { rawJSON } = JSON as { rawJSON?: (text: string) => unknown };
  const keep = (_: string, value: unknown, at?: { source?: string }): unknown =>
    rawJSON && typeof value === "number" && !Number.isSafeInteger(value) && BIG.test(at?.source ?? "") ? rawJSON(at!.source!) : value;
  return JSON.parse(text, keep);
}

/** Returns the parsed JSON, or the text itself if it is not JSON. */
export function parsed(text: string): unknown {
  try {
    return parse(text);
  } catch {
    return text;
  }
}

/** Returns whether a value is a large integer from `parse`. */
export const isBig = (value: unknown): boolean => typeof value === "object" && value !== null && Object.isFrozen(value) && "rawJSON" in value;

/** Decodes the JSON fields (`...Json`) of a message; `pack` encodes them. */
export function unpack(value: unknown): any {
  return mapped(value, (bytes) => {
    try {
      return typeof bytes === "string" ? decode(bytes, parse) : bytes;
    } catch {
      return bytes;
    }
  });
}

export const pack = (value: unknown): any => mapped(value, encode);

function mapped(value: unknown, change: (value: unknown) => unknown): unknown {
  if (Array.isArray(value)) return value.map((each) => mapped(each, change));
  if (typeof value !== "object" || value === null || isBig(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, name.endsWith("Json") ? change(each) : mapped(each, change)]));
}
