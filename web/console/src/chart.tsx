/** Numbers as bars, for a tool of the page: a table, so that whoever does not see the bars reads it. */

import type { VNode } from "preact";

import { visible } from "./visible";


export interface ChartData {
  title: string;
  labels: string[];
  values: number[];
}

export const CHART_VALUES_MAX = 50;

/** Returns what a model gave as a chart, or a sentence about what is wrong with it. */
export function chartOf(args: any): ChartData | string {
  const { title = "", labels, values } = args ?? {};
  if (!Array.isArray(values) || !values.length || values.length > CHART_VALUES_MAX || !values.every(Number.isFinite))
    return `values must be 1 to ${CHART_VALUES_MAX} numbers.`;
  if (!Array.isArray(labels) || labels.length !== values.length) return "There must be one label a value.";
  return { title: String(title), labels: labels.map(String), values };
}

export function Chart({ title, labels, values }: ChartData): VNode {
  const most = Math.max(...values.map(Math.abs)) || 1;
  return (
    <table class="chart">
      <caption>{visible(title)}</caption>
      <tbody>
        {values.map((value, key) => (
          <tr key={key}>
            <th scope="row">{visible(labels[key] ?? "")}</th>
            <td class="lane">
              <div class={`bar ${value < 0 ? "retry" : ""}`} style={{ width: `${100 * (Math.abs(value) / most)}%` }} />
            </td>
            <td>{value.toLocaleString()}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
