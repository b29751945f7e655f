/** A bar chart, drawn as a table so that screen readers can read it. */

import type { VNode } from "preact";

import { visible } from "./visible";

export interface ChartData {
  title: string;
  labels: string[];
  values: number[];
  /** Value of the longest bar, by default the largest of the values. */
  most?: number;
}

export const CHART_VALUES_MAX = 50;

/** Returns the chart in the arguments of a model, or an error message. */
export function chartOf(args: any): ChartData | string {
  const { title = "", labels, values } = args ?? {};
  if (!Array.isArray(values) || !values.length || values.length > CHART_VALUES_MAX || !values.every(Number.isFinite))
    return `values must be 1 to ${CHART_VALUES_MAX} numbers.`;
  if (!Array.isArray(labels) || labels.length !== values.length) return "labels must have one label per value.";
  return { title: String(title), labels: labels.map(String), values };
}

export function Chart({ title, labels, values, most = Math.max(...values.map(Math.abs)) || 1 }: ChartData): VNode {
  return (
    <table class="chart">
      <caption>{visible(title)}</caption>
      <tbody>
        {values.map((value, key) => (
          <tr key={key}>
            <th scope="row">{visible(labels[key] ?? "")}</th>
            <td class="lane"><div class={`bar ${value < 0 ? "retry" : ""}`} style={{ width: `${100 * (Math.abs(value) / most)}%` }} /></td>
            <td>{value.toLocaleString()}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
