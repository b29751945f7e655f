/** Pages by path. A page is listed if the user may call its method. */

import { may, path } from "./state";

export const MENU = {
  runs: { name: "Runs", method: "agent.v1.AgentService/ListRuns" },
  background: { name: "Background", method: "agent.v1.JobService/ListJobs" },
  workflows: { name: "Workflows", method: "agent.v1.WorkflowService/ListWorkflows" },
  goals: { name: "Goals", method: "agent.v1.GoalService/ListGoals" },
  agents: { name: "Agents", method: "agent.v1.AgentRegistryService/ListAgents" },
  tools: { name: "Tools", method: "tool.v1.ToolService/ListTools" },
  sources: { name: "Sources", method: "tool.v1.SourceService/ListSources" },
  documents: { name: "Documents", method: "tool.v1.DocumentService/ListDocuments" },
  schedules: { name: "Schedules", method: "agent.v1.ScheduleService/ListSchedules" },
  triggers: { name: "Triggers", method: "agent.v1.TriggerService/ListTriggers" },
  rules: { name: "Approval rules", method: "tool.v1.RuleService/ListRules" },
  operations: { name: "Operations", method: "agent.v1.UsageService/GetUsage" },
  attention: { name: "Needs attention", method: "agent.v1.OperatorService/ListAttention" },
  audit: { name: "Audit", method: "tool.v1.AuditService/ListAudit" },
  notifications: { name: "Notifications", method: "notify.v1.NotifyService/ListNotifications" },
  channels: { name: "Channels", method: "notify.v1.ChannelService/ListChannels" },
} as const;

export type ListPath = keyof typeof MENU;
/** A page, with an icon of the same name and the key that opens it after g. */
export interface Entry {
  path: string;
  name: string;
  icon: ListPath | "chat" | "inbox" | "settings";
  key?: string;
}

const KEYS: Partial<Record<ListPath, string>> = { runs: "r", background: "b", workflows: "w", goals: "o" };
const list = (name: ListPath): Entry[] => (may(MENU[name].method) ? [{ path: `/${name}`, name: MENU[name].name, icon: name, ...(KEYS[name] ? { key: KEYS[name] } : {}) }] : []);

/** The pages that the user may see, by group. */
export function groups(): [string, Entry[]][] {
  const some = (...names: ListPath[]): Entry[] => names.flatMap(list);
  const all: [string, Entry[]][] = [
    ["", [{ path: "/", name: "Chat", icon: "chat", key: "c" }, { path: "/inbox", name: "Inbox", icon: "inbox", key: "i" }, ...some("runs", "background", "workflows", "goals")]],
    ["Build", some("agents", "tools", "sources", "documents", "schedules", "triggers", "rules")],
    ["Operate", [...some("operations", "attention", "audit", "notifications", "channels"), { path: "/settings", name: "Settings", icon: "settings" }]],
  ];
  return all.filter(([, entries]) => entries.length);
}

export const entries = (): Entry[] => groups().flatMap(([, all]) => all);

export function isHere(page: string): boolean {
  return page === "/" ? path.value === "/" || path.value.startsWith("/c/") : path.value === page || path.value.startsWith(`${page}/`);
}
