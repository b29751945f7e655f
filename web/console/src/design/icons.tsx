/** Icons of 16 px, drawn with one stroke. */

import type { VNode } from "preact";

const PATHS = {
  chat: "M2 3h12v8H7l-3 3v-3H2z",
  inbox: "M2 9l2-6h8l2 6v4H2zM2 9h4l1 2h2l1-2h4",
  runs: "M3 4h10M3 8h7M3 12h9",
  background: "M8 2.5a5.5 5.5 0 1 0 0 11a5.5 5.5 0 0 0 0-11zM8 5v3l2 2",
  workflows: "M2 2h4v4H2zM10 10h4v4h-4zM6 4h6v6",
  goals: "M3 14V2M3 3h9l-2 3 2 3H3",
  agents: "M8 2.5a2.5 2.5 0 1 0 0 5a2.5 2.5 0 0 0 0-5zM3 14c0-3 2-5 5-5s5 2 5 5",
  tools: "M10 2l4 4-8 8H2v-4z",
  sources: "M5 2v4M11 2v4M4 6h8v3a4 4 0 0 1-8 0zM8 13v2",
  documents: "M4 2h5l3 3v9H4zM9 2v3h3M6 8h4M6 11h4",
  schedules: "M2 3h12v11H2zM2 6h12M5 1.5v3M11 1.5v3",
  triggers: "M9 1L3 9h4l-1 6 6-8H8z",
  rules: "M8 2l5 2v4c0 3-2 5-5 6-3-1-5-3-5-6V4z",
  operations: "M2 2v12h12M5 11V8M8 11V4M11 11V6",
  attention: "M8 2l6 11H2zM8 6v3M8 11v.2",
  audit: "M4 2h6l3 3v9H4zM6 8h5M6 11h5",
  notifications: "M4 11V7a4 4 0 0 1 8 0v4l1 1H3zM7 14h2",
  channels: "M2 8l12-5-4 11-3-4z",
  settings: "M8 6a2 2 0 1 0 0 4a2 2 0 0 0 0-4zM8 1.5v2M8 12.5v2M1.5 8h2M12.5 8h2M3.4 3.4l1.4 1.4M11.2 11.2l1.4 1.4M3.4 12.6l1.4-1.4M11.2 4.8l1.4-1.4",
  search: "M7 2.5a4.5 4.5 0 1 0 0 9a4.5 4.5 0 0 0 0-9zM10.5 10.5L14 14",
  menu: "M2 4h12M2 8h12M2 12h12",
  theme: "M8 2a6 6 0 1 0 0 12zM8 2a6 6 0 0 1 0 12",
  help: "M6 6a2 2 0 1 1 3 1.7c-.7.4-1 .8-1 1.6M8 11.8v.2M8 1.5a6.5 6.5 0 1 0 0 13a6.5 6.5 0 0 0 0-13z",
  leave: "M6 2H2v12h4M10 5l3 3-3 3M13 8H6",
  history: "M3 8a5 5 0 1 0 1.5-3.6M3 2v3h3M8 5.5V8l2 1.5",
  close: "M4 4l8 8M12 4l-8 8",
  plus: "M8 3v10M3 8h10",
  check: "M3 8.5l3 3 7-7",
  chevron: "M6 4l4 4-4 4",
  copy: "M6 6h8v8H6zM4 10H2V2h8v2",
  download: "M8 2v8M5 7l3 3 3-3M2 13h12",
  stop: "M4 4h8v8H4z",
  mail: "M2 4h12v9H2zM2 4.5l6 4.5 6-4.5",
  edit: "M11 2.5l2.5 2.5-8 8H3v-2.5z",
  attach: "M13 7.5l-5 5a3 3 0 0 1-4.2-4.2l5.5-5.5a2 2 0 0 1 2.8 2.8L6.8 10.9a1 1 0 0 1-1.4-1.4L10 5",
  more: "M3.5 8h.01M8 8h.01M12.5 8h.01",
  down: "M8 3v10M4 9l4 4 4-4",
  up: "M8 13V3M4 7l4-4 4 4",
  again: "M13 8a5 5 0 1 1-1.5-3.6M13 2v3h-3",
  web: "M8 2a6 6 0 1 0 0 12A6 6 0 0 0 8 2zM2 8h12M8 2c2 2 2 10 0 12M8 2c-2 2-2 10 0 12",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }): VNode {
  return <svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d={PATHS[name]} /></svg>;
}
