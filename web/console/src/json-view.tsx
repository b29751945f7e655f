import type { VNode } from "preact";

import { visible } from "./visible";

const SHOWN_MAX = 20_000;

export function Json({ value }: { value: unknown }): VNode {
  const text = typeof value === "string" ? value : (JSON.stringify(value, null, 2) ?? "");
  return (
    <pre class="json" tabIndex={0}>
      {visible(text.length > SHOWN_MAX ? `${text.slice(0, SHOWN_MAX)}\n... (${text.length} characters)` : text)}
    </pre>
  );
}
