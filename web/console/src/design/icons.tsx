/** Icons of 16 px, drawn with one stroke. */

import type { VNode } from "preact";

import PATHS from "./icons.json";

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }): VNode {
  return <svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d={PATHS[name]} /></svg>;
}
