import { readFileSync } from "node:fs";
import { expect, it } from "vitest";

const source = readFileSync(new URL("../src/design/tokens.css", import.meta.url), "utf8");

const colours = Object.fromEntries([...source.matchAll(/--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);/g)].map(([, name, light, dark]) => [name, [light!, dark!]]));

function luminance(colour: string): number {
  const [red = 0, green = 0, blue = 0] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function contrast(one: string, other: string, theme: number): number {
  const [low = 0, high = 0] = [luminance(colours[one]![theme]!), luminance(colours[other]![theme]!)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

const SURFACES = ["bg", "panel", "sunken"];
const TEXTS = ["ink", "ink-2", "ink-3", "accent", "ok", "warn", "bad", "info"].flatMap((text) => SURFACES.map((surface) => [text, surface]));
const TONES = ["accent", "ok", "warn", "bad", "info"].flatMap((tone) => [tone, "ink", "ink-2"].map((text) => [text, `${tone}-soft`]));

it.each([...TEXTS, ...TONES, ["on-accent", "accent"], ["panel", "bad"]])("%s on %s has the contrast of text", (text, surface) => {
  for (const theme of [0, 1]) expect(contrast(text!, surface!, theme)).toBeGreaterThanOrEqual(4.5);
});

it.each(SURFACES)("borders of fields are seen on %s", (surface) => {
  for (const theme of [0, 1]) expect(contrast("edge", surface, theme)).toBeGreaterThanOrEqual(3);
});
