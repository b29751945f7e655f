/** Values of the contract as text. */

import type { UsageJson } from "@pawl/client";
import type { VNode } from "preact";

import { ago, moment, word } from "./state";
import { visible } from "./visible";

/** The name of an enum value in words. */
export const short = (name: string | undefined, prefix: string): string => word((name ?? "").replace(prefix, ""));
export const sentence = (text: string): string => text.charAt(0).toUpperCase() + text.slice(1);
export const time = (at: string | undefined): VNode | undefined => (at ? <time title={moment(at)}>{ago(at)}</time> : undefined);
/** A time in a time zone, with its day of the week. */
export const day = (at: string, timeZone: string): string => new Date(at).toLocaleString(undefined, { weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone });
export const cut = (text: string | undefined): string => visible(text ?? "").slice(0, 300);
/** Markdown without its marks and without IDs of runs, on one line. */
export const plain = (text: string): string => text.replace(/ ?\(?\brun[_ ][0-9a-f]{32}\)?/g, "").replace(/[*_`#|]{1,6}|^\s*[-+] |\[[ x]\] |\|?[-: |]{5,}/gm, " ").replace(/\s+/g, " ").trim();
export const tokenCount = (usage: UsageJson | undefined): number => Number(usage?.inputTokens ?? 0) + Number(usage?.outputTokens ?? 0);
export const runLink = (id: string | undefined, name?: string): VNode | undefined => (id ? <a href={`/runs/${id}`}>{name ?? id.slice(-8)}</a> : undefined);

/** A time span such as "every 5 minutes". */
export function span(seconds: number): string {
  const [size, unit] = ([[86_400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]] as const).find(([each]) => seconds % each === 0) ?? [1, "second"];
  const count = seconds / size;
  return count === 1 ? unit : `${count} ${unit}s`;
}
