/** Tables with a fixed layout. Long texts are cut, and shown in full on hover. */

import type { ComponentChildren, VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon, type IconName } from "./icons";
import { visible } from "../visible";

export interface Column<T> {
  name: string;
  of: (item: T) => ComponentChildren;
  /** Shown before the text. */
  icon?: (item: T) => IconName;
  /** Width in px. Columns without one share the rest. */
  size?: number;
  /** Narrow boxes hide columns with 3 first, then those with 2. They put those with 1 below the others. */
  priority?: 1 | 2 | 3;
  /** A quiet second line. */
  under?: (item: T) => ComponentChildren;
  /** The sort key of the column, if the user can sort it. */
  by?: (item: T) => number | string;
  /** Only in lists, not on the page of an item. */
  listed?: true;
  /** Only on the page of an item. */
  detailed?: true;
  /** Numbers are right-aligned. */
  num?: true;
}

/** Shows the full text of a cell that is cut. */
function reveal({ target }: Event): void {
  const cell = (target as Element).closest?.<HTMLElement>("td, th");
  if (cell) cell.title = cell.scrollWidth > cell.clientWidth ? cell.innerText : "";
}

const classOf = <T,>({ num, priority }: Column<T>): string => [num && "num", priority && `p${priority}`].filter(Boolean).join(" ");

export function Table<T>({ name, columns: all, items, to }: { name: string; columns: Column<T>[]; items: T[]; to?: (item: T) => string | undefined }): VNode {
  const [sorted, setSorted] = useState<{ name: string; down: boolean }>();
  const columns = all.filter(({ detailed }) => !detailed);
  const by = columns.find((column) => column.name === sorted?.name)?.by;
  const inOrder = by ? items.toSorted((one, other) => (by(one) < by(other) ? -1 : by(one) > by(other) ? 1 : 0) * (sorted?.down ? -1 : 1)) : items;
  const show = (value: ComponentChildren): ComponentChildren => (typeof value === "string" ? visible(value) : value);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={name} onMouseOver={reveal}>
      <table class="list">
        <thead>
          <tr>
            {columns.map((column) => (
              <th
                key={column.name}
                scope="col"
                class={classOf(column)}
                style={column.size ? { width: `${column.size}px` } : {}}
                {...(sorted?.name === column.name ? { "aria-sort": sorted.down ? "descending" : "ascending" } : {})}
              >
                {column.by ? (
                  <button class="plain small" onClick={() => setSorted(sorted?.name !== column.name ? { name: column.name, down: true } : sorted.down ? { name: column.name, down: false } : undefined)}>
                    {column.name} {sorted?.name === column.name && <Icon name={sorted.down ? "down" : "up"} />}
                  </button>
                ) : column.name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {inOrder.map((item, row) => (
            <tr key={to?.(item) ?? row}>
              {columns.map((column, index) => (
                <td key={column.name} class={classOf(column)}>
                  {column.icon && <Icon name={column.icon(item)} />}
                  {!index && to?.(item) ? <a class="opens" href={to(item) ?? ""} data-item>{show(column.of(item))}</a> : show(column.of(item))}
                  {column.under && <small class="under">{show(column.under(item))}</small>}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
