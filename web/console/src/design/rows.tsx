/** A long list in a box that scrolls. Only the rows in view are in the page. */

import type { VNode } from "preact";
import { useState } from "preact/hooks";

const SPARE = 8;

export function Rows<T>({ name, items, size, height, role, row }: { name: string; items: T[]; size: number; height: number; role?: "table"; row: (item: T, index: number) => VNode }): VNode {
  const [top, setTop] = useState(0);
  const first = Math.max(0, Math.floor(top / size) - SPARE);
  const some = items.slice(first, first + Math.ceil(height / size) + 2 * SPARE);
  return (
    <div
      class="rows"
      tabIndex={0}
      role="region"
      aria-label={name}
      style={{ height: `${Math.min(height, items.length * size)}px` }}
      onScroll={(event) => setTop(event.currentTarget.scrollTop)}
    >
      <div style={{ height: `${items.length * size}px` }}>
        <div {...(role ? { role, "aria-label": name, "aria-rowcount": items.length } : {})} style={{ transform: `translateY(${first * size}px)` }}>
          {some.map((item, index) => row(item, first + index))}
        </div>
      </div>
    </div>
  );
}
