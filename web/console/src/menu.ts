/** List pages by path, with their names. A page is shown if the user may call its method. */

export const MENU = {
  runs: { name: "Runs", method: "agent.v1.AgentService/ListRuns" },
  background: { name: "Background", method: "agent.v1.JobService/ListJobs" },
  goals: { name: "Goals", method: "agent.v1.GoalService/ListGoals" },
  workflows: { name: "Workflows", method: "agent.v1.WorkflowService/ListWorkflows" },
  attention: { name: "Needs attention", method: "agent.v1.OperatorService/ListAttention" },
  agents: { name: "Agents", method: "agent.v1.AgentRegistryService/ListAgents" },
  tools: { name: "Tools", method: "tool.v1.ToolService/ListTools" },
  rules: { name: "Approval rules", method: "tool.v1.RuleService/ListRules" },
  schedules: { name: "Schedules", method: "agent.v1.ScheduleService/ListSchedules" },
  triggers: { name: "Triggers", method: "agent.v1.TriggerService/ListTriggers" },
  audit: { name: "Audit", method: "tool.v1.AuditService/ListAudit" },
  notifications: { name: "Notifications", method: "notify.v1.NotifyService/ListNotifications" },
  channels: { name: "Channels", method: "notify.v1.ChannelService/ListChannels" },
  sources: { name: "Sources", method: "tool.v1.SourceService/ListSources" },
  documents: { name: "Documents", method: "tool.v1.DocumentService/ListDocuments" },
} as const;

export type ListPath = keyof typeof MENU;
