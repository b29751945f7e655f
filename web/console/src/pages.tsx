/** Definitions of the list pages: columns, filters and actions. */

import {
  type AgentUsageJson,
  type AgentVersionJson,
  type AuditEntryJson,
  type AuditKindJson,
  type BackgroundJobJson,
  type CallJson,
  type ChannelDeliveryJson,
  type ChannelJson,
  type DocumentJson,
  encode,
  type NotificationJson,
  requestId,
  type ResolutionJson,
  type RuleJson,
  type RunInNeedJson,
  type ScheduleFireJson,
  type ScheduleJson,
  type SourceJson,
  type ToolFiguresJson,
  type ToolJson,
  type TriggerJson,
  type VerifyAuditResponseJson,
} from "@pawl/client";
import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { type Action, Actions, GONE } from "./actions";
import { CallCard, jobState } from "./cards";
import { goals } from "./goals";
import { parse } from "./json";
import { Badge, toneOf } from "./design/parts";
import { type Column, Table } from "./design/table";
import { Below, type Resource } from "./resource";
import { runs } from "./runs";
import { ago, go, lasted, moment, pawl, word } from "./state";
import { visible } from "./visible";
import { workflows } from "./workflows";

const short = (name: string | undefined, prefix: string): string => word((name ?? "").replace(prefix, ""));
const time = (at: string | undefined): VNode | undefined => (at ? <time title={moment(at)}>{ago(at)}</time> : undefined);
const cut = (text: string | undefined): VNode => <span class="cut">{visible(text ?? "").slice(0, 160)}</span>;
const runLink = (id: string | undefined): VNode | undefined => (id ? <a href={`/runs/${id}`}>{id.slice(-8)}</a> : undefined);
const paused = (item: { pauseTime?: string; pauseNote?: string; selfPaused?: boolean }): string =>
  item.pauseTime ? `paused${item.selfPaused ? " automatically" : ""}${item.pauseNote ? `: ${visible(item.pauseNote)}` : ""}` : "active";

const agents: Resource<AgentVersionJson> = {
  path: "agents",
  declared: ({ definition, draft }) => [draft ? "" : "agent", definition?.name ?? ""],
  empty: "No agents yet. Runs use the default agent. Create one here or with pawl apply.",
  list: async (pageToken, filters) => {
    const page = await pawl.agents.listAgents({ pageSize: 50, pageToken, drafts: !!filters["drafts"] });
    return { items: page.agents ?? [], next: page.nextPageToken };
  },
  filters: [{ name: "drafts", label: "My drafts", on: true }],
  id: ({ definition }) => definition?.name ?? "",
  get: async (name) => (await pawl.agents.getAgent({ name })).agent,
  columns: [
    { name: "Name", of: ({ definition }) => definition?.name },
    { name: "Version", of: ({ version, draft }) => (draft ? "draft" : version) },
    { name: "Model", of: ({ definition }) => definition?.options?.model },
    { name: "Tools", of: ({ toolNames }) => cut(toolNames?.join(", ")) },
    { name: "Saved", of: ({ createTime }) => time(createTime) },
    { name: "By", of: ({ createUserId }) => createUserId },
  ],
  make: {
    name: "New agent",
    method: "agent.v1.AgentRegistryService/UpdateAgent",
    value: () => ({ name: "", options: { instructions: "" }, tools: { names: [] } }),
    save: saveAgent,
  },
  edit: {
    name: "Edit agent",
    method: "agent.v1.AgentRegistryService/UpdateAgent",
    value: ({ definition }) => definition,
    save: saveAgent,
  },
  actions: [
    {
      name: "Delete",
      method: "agent.v1.AgentRegistryService/DeleteAgent",
      when: isSaved,
      bad: true,
      run: async ({ definition }) => {
        await pawl.agents.deleteAgent({ name: definition?.name ?? "" });
        return GONE;
      },
    },
  ],
  below: (agent) => (
    <>
      {isSaved(agent) && (
        <Below<AgentVersionJson>
          name="Versions"
          method="agent.v1.AgentRegistryService/ListAgentVersions"
          load={async () => (await pawl.agents.listAgentVersions({ name: agent.definition?.name ?? "" })).agents}
          columns={[
            { name: "Version", of: ({ version }) => version },
            { name: "Saved", of: ({ createTime }) => time(createTime) },
            { name: "By", of: ({ createUserId }) => createUserId },
          ]}
        />
      )}
      <Below<AgentUsageJson>
        name="Usage"
        method="agent.v1.AgentRegistryService/GetAgentUsage"
        load={async () => (await pawl.agents.getAgentUsage({ name: agent.definition?.name ?? "" })).days}
        columns={[
          { name: "Day", of: ({ day }) => day },
          { name: "Runs", of: ({ runs }) => runs ?? 0 },
          { name: "Users", of: ({ users }) => users ?? 0 },
          { name: "Tokens", of: ({ usage }) => Number(usage?.inputTokens ?? 0) + Number(usage?.outputTokens ?? 0) },
        ]}
      />
    </>
  ),
};

/** The built-in default agent is not saved. It has no versions and cannot be deleted. */
function isSaved({ createTime }: AgentVersionJson): boolean {
  return !!createTime;
}

async function saveAgent(definition: object): Promise<string> {
  const { agent, unmatched = [] } = await pawl.agents.updateAgent({ definition });
  return `Saved version ${agent?.version}.${unmatched.length ? ` No tool matches ${unmatched.join(", ")}.` : ""}`;
}

const figures: Column<ToolFiguresJson>[] = [
  { name: "Calls", of: (each) => each.executionCount ?? 0 },
  { name: "Errors", of: (each) => each.errorCount ?? 0 },
  { name: "Cached", of: (each) => each.cachedCount ?? 0 },
  { name: "p50", of: (each) => each.executionCount && lasted(Number(each.p50Seconds ?? 0)) },
  { name: "p95", of: (each) => each.executionCount && lasted(Number(each.p95Seconds ?? 0)) },
  { name: "Approvals asked", of: (each) => each.approvalAskedCount ?? 0 },
  { name: "Approved", of: (each) => each.approvedCount ?? 0 },
  { name: "Edited", of: (each) => each.editedCount ?? 0 },
  { name: "Rejected", of: (each) => each.rejectedCount ?? 0 },
];

const tools: Resource<ToolJson> = {
  path: "tools",
  empty: "No tools. Workers and sources provide tools.",
  list: async (pageToken) => {
    const page = await pawl.tools.listTools({ pageSize: 100, pageToken });
    return { items: page.tools ?? [], next: page.nextPageToken };
  },
  id: ({ definition }) => definition?.name ?? "",
  get: async (name) => (await pawl.tools.getTool({ name })).tool,
  columns: [
    { name: "Name", of: ({ definition }) => definition?.name },
    { name: "Category", of: ({ definition }) => short(definition?.category, "TOOL_CATEGORY_") },
    { name: "Effect", of: ({ definition }) => short(definition?.effectClass, "EFFECT_CLASS_") },
    { name: "Version", of: ({ version }) => version },
    { name: "Source", of: ({ source }) => source },
    { name: "Description", of: ({ definition }) => cut(definition?.description) },
  ],
  edit: {
    name: "Edit tool",
    method: "tool.v1.ToolService/RegisterTool",
    // Tools of workers and sources are defined there.
    when: ({ source }) => source === "store",
    value: ({ definition }) => definition,
    save: async (definition) => void (await pawl.tools.registerTool({ definition, replace: true })),
  },
  actions: [
    {
      name: "Remove",
      method: "tool.v1.ToolService/UnregisterTool",
      when: ({ source }) => source === "store",
      bad: true,
      run: async ({ definition }) => {
        await pawl.tools.unregisterTool({ name: definition?.name ?? "" });
        return GONE;
      },
    },
  ],
  below: ({ definition }) => (
    <Below<ToolFiguresJson>
      name="Statistics"
      method="tool.v1.AuditService/GetToolAnalytics"
      load={async () => (await pawl.audit.getToolAnalytics({ toolName: definition?.name ?? "" })).tools}
      columns={figures}
    />
  ),
};

const rules: Resource<RuleJson> = {
  path: "rules",
  declared: ({ name, ruleId }) => ["rule", name || (ruleId ?? "")],
  empty: "No rules. The category of a tool decides whether it needs approval. Create a rule here or with an approval in the inbox.",
  list: async (pageToken, filters) => {
    const page = await pawl.rules.listRules({ pageSize: 100, pageToken, includeEnded: !!filters["ended"], allUsers: !!filters["everybody"] });
    return { items: page.rules ?? [], next: page.nextPageToken };
  },
  filters: [
    { name: "ended", label: "Include ended", on: true },
    { name: "everybody", label: "All users", on: true },
  ],
  id: ({ ruleId }) => ruleId ?? "",
  columns: [
    { name: "Rule", of: ({ ruleId }) => ruleId?.slice(-8) },
    { name: "Effect", of: ({ effect }) => short(effect, "RULE_EFFECT_") },
    { name: "Tool", of: ({ toolName }) => toolName },
    { name: "Where", of: ({ scope, scopeId }) => `${short(scope, "RULE_SCOPE_")}${scopeId ? ` ${scopeId.slice(-12)}` : ""}` },
    { name: "Uses", of: ({ uses = 0, usesMax }) => (usesMax ? `${uses} of ${usesMax}` : uses) },
    { name: "Ends", of: ({ expireTime, revokeTime, suspended }) => (revokeTime ? "revoked" : suspended ? "suspended" : time(expireTime)) },
    { name: "By", of: ({ userId }) => userId },
    { name: "Reason", of: ({ reason }) => cut(reason) },
  ],
  make: {
    name: "New rule",
    method: "tool.v1.RuleService/CreateRule",
    value: () => ({ effect: "RULE_EFFECT_ASK", scope: "RULE_SCOPE_USER", toolName: "", arguments: [], reason: "" }),
    save: async (rule) => void (await pawl.rules.createRule({ requestId: requestId(), rule })),
  },
  actions: [
    {
      name: "Revoke",
      method: "tool.v1.RuleService/RevokeRule",
      when: ({ revokeTime }) => !revokeTime,
      bad: true,
      run: async ({ ruleId = "" }) => {
        await pawl.rules.revokeRule({ ruleId });
        return GONE;
      },
    },
  ],
};

const KINDS = ["PROPOSED", "DECIDED", "EXECUTED", "RETURNED", "RULE"] as const;
const audit: Resource<AuditEntryJson> = {
  path: "audit",
  empty: "No matching entries.",
  list: async (pageToken, { run = "", call = "", tool = "", user = "", kind = "" }) => {
    const only = { runId: run, callId: call, toolName: tool, userId: user, ...(kind ? { kind: `AUDIT_KIND_${kind}` as AuditKindJson } : {}) };
    const page = await pawl.audit.listAudit({ pageSize: 100, pageToken, ...only });
    return { items: page.entries ?? [], next: page.nextPageToken };
  },
  filters: [
    { name: "kind", label: "Kind", options: KINDS },
    { name: "tool", label: "Tool" },
    { name: "user", label: "User" },
    { name: "run", label: "Run" },
    { name: "call", label: "Call" },
  ],
  id: ({ seq }) => String(seq ?? ""),
  columns: [
    { name: "Number", of: ({ seq }) => seq },
    { name: "Kind", of: ({ kind }) => short(kind, "AUDIT_KIND_") },
    { name: "When", of: (each) => time(each.time) },
    { name: "Tool", of: ({ toolName }) => toolName },
    { name: "Verdict", of: ({ verdict, reason }) => cut([word(verdict), reason].filter(Boolean).join(": ")) },
    { name: "User", of: ({ userId }) => userId },
    { name: "By", of: ({ byUserId }) => byUserId },
    { name: "Run", of: ({ runId }) => runLink(runId) },
  ],
  above: () => <Verify />,
};

/** Verifies the audit chain, and shows where it is broken. */
function Verify(): VNode {
  const [state, setState] = useState<VerifyAuditResponseJson>();
  const [fault, setFault] = useState("");
  const start = (): void => {
    setState({});
    setFault("");
    const leave = pawl.streams.subscribe<VerifyAuditResponseJson>({
      method: "pawl.tool.v1.AuditService/VerifyAudit",
      request: () => ({}),
      message: (message) => {
        setState(message);
        if (message.done || message.problem) leave();
      },
      end: (error) => error && setFault(error.message),
    });
  };
  return (
    <p class="buttons">
      <button class="second" onClick={start}>
        Verify the chain
      </button>
      <span role="status" class={fault || state?.problem ? "fault" : ""}>
        {fault}
        {state?.problem
          ? `The first invalid entry is ${state.problem.seq}: ${state.problem.explanation}`
          : state && !fault && (state.done ? `All ${state.verifiedSeq ?? 0} entries are intact.` : `${state.verifiedSeq ?? 0} verified ...`)}
      </span>
    </p>
  );
}

const fires: Column<ScheduleFireJson>[] = [
  { name: "Due", of: ({ dueTime }) => time(dueTime) },
  { name: "Outcome", of: ({ outcome }) => short(outcome, "SCHEDULE_FIRE_OUTCOME_") },
  { name: "Reason", of: ({ reason }) => cut(reason) },
  { name: "Run", of: ({ runId }) => runLink(runId) },
  { name: "State", of: ({ runState }) => word(runState) },
];

const schedules: Resource<ScheduleJson> = {
  path: "schedules",
  declared: ({ definition }) => ["schedule", definition?.name ?? ""],
  empty: "No schedules. Create one here or with pawl schedules create.",
  list: async () => ({ items: (await pawl.schedules.listSchedules({})).schedules ?? [] }),
  id: ({ definition }) => definition?.name ?? "",
  get: async (name) => (await pawl.schedules.getSchedule({ name })).schedule,
  columns: [
    { name: "Name", of: ({ definition }) => definition?.name },
    { name: "When", of: ({ definition: each, cronText }) => cronText || each?.cron || (each?.intervalSeconds ? `every ${each.intervalSeconds} s` : "") },
    { name: "Next", of: ({ nextTime }) => time(nextTime) },
    { name: "State", of: paused },
    { name: "Failures", of: ({ failures }) => failures || "" },
    { name: "Text", of: ({ definition }) => cut(definition?.text) },
  ],
  make: {
    name: "New schedule",
    method: "agent.v1.ScheduleService/CreateSchedule",
    value: () => ({ name: "", text: "", cron: "0 9 * * 1-5", timeZone: Intl.DateTimeFormat().resolvedOptions().timeZone }),
    save: async (definition) => void (await pawl.schedules.createSchedule({ definition })),
  },
  edit: {
    name: "Edit schedule",
    method: "agent.v1.ScheduleService/UpdateSchedule",
    value: ({ definition }) => definition,
    save: async (definition) => void (await pawl.schedules.updateSchedule({ definition })),
  },
  actions: [
    {
      name: "Run now",
      method: "agent.v1.ScheduleService/TriggerSchedule",
      run: async ({ definition }) => {
        const { fire } = await pawl.schedules.triggerSchedule({ name: definition?.name ?? "", requestId: requestId() });
        return `Outcome: ${short(fire?.outcome, "SCHEDULE_FIRE_OUTCOME_")}.`;
      },
    },
    {
      name: "Pause",
      method: "agent.v1.ScheduleService/PauseSchedule",
      when: ({ pauseTime }) => !pauseTime,
      ask: "Reason (optional)",
      run: ({ definition }, note) => pawl.schedules.pauseSchedule({ name: definition?.name ?? "", note }),
    },
    {
      name: "Resume",
      method: "agent.v1.ScheduleService/ResumeSchedule",
      when: ({ pauseTime }) => !!pauseTime,
      run: ({ definition }) => pawl.schedules.resumeSchedule({ name: definition?.name ?? "" }),
    },
    {
      name: "Delete",
      method: "agent.v1.ScheduleService/DeleteSchedule",
      bad: true,
      run: async ({ definition }) => {
        await pawl.schedules.deleteSchedule({ name: definition?.name ?? "" });
        return GONE;
      },
    },
  ],
  below: ({ fires: all = [] }) => (
    <>
      <h2>Fires</h2>
      {all.length ? <Table name="Fires" columns={fires} items={all} /> : <p class="quiet">Not fired yet.</p>}
    </>
  ),
};

const triggers: Resource<TriggerJson> = {
  path: "triggers",
  declared: ({ definition }) => ["trigger", definition?.name ?? ""],
  empty: "No triggers. Create one here or with pawl triggers create.",
  list: async () => ({ items: (await pawl.triggers.listTriggers({})).triggers ?? [] }),
  id: ({ definition }) => definition?.name ?? "",
  get: async (name) => (await pawl.triggers.getTrigger({ name })).trigger,
  columns: [
    { name: "Name", of: ({ definition }) => definition?.name },
    { name: "Source", of: ({ definition: each }) => (each?.mailbox ? `mailbox ${each.mailbox.username ?? ""}` : "webhook") },
    { name: "Id", of: ({ triggerId }) => triggerId },
    { name: "State", of: (each) => (each.unreachableTime ? `unreachable: ${visible(each.unreachableReason ?? "")}` : paused(each)) },
    { name: "Failures", of: ({ failures }) => failures || "" },
    { name: "Refused", of: ({ refusedCount, refusedReason }) => refusedCount && `${refusedCount}: ${cut(refusedReason)}` },
    { name: "Text", of: ({ definition }) => cut(definition?.text) },
  ],
  make: {
    name: "New trigger",
    method: "agent.v1.TriggerService/CreateTrigger",
    value: () => ({ name: "", text: "{{event}}", webhook: { authentication: "WEBHOOK_AUTHENTICATION_SIGNATURE" } }),
    save: async (definition) => secret((await pawl.triggers.createTrigger({ definition })).secret),
  },
  edit: {
    name: "Edit trigger",
    method: "agent.v1.TriggerService/UpdateTrigger",
    value: ({ definition }) => definition,
    save: async (definition) => void (await pawl.triggers.updateTrigger({ definition })),
  },
  actions: [
    {
      name: "Pause",
      method: "agent.v1.TriggerService/PauseTrigger",
      when: ({ pauseTime }) => !pauseTime,
      ask: "Reason (optional)",
      run: ({ definition }, note) => pawl.triggers.pauseTrigger({ name: definition?.name ?? "", note }),
    },
    {
      name: "Resume",
      method: "agent.v1.TriggerService/ResumeTrigger",
      when: ({ pauseTime }) => !!pauseTime,
      run: ({ definition }) => pawl.triggers.resumeTrigger({ name: definition?.name ?? "" }),
    },
    {
      name: "Rotate secret",
      method: "agent.v1.TriggerService/RotateTriggerSecret",
      when: ({ definition }) => !!definition?.webhook,
      bad: true,
      run: async ({ definition }) => secret((await pawl.triggers.rotateTriggerSecret({ name: definition?.name ?? "" })).secret),
    },
    {
      name: "Delete",
      method: "agent.v1.TriggerService/DeleteTrigger",
      bad: true,
      run: async ({ definition }) => {
        await pawl.triggers.deleteTrigger({ name: definition?.name ?? "" });
        return GONE;
      },
    },
  ],
  below: ({ fires: all = [] }) => (
    <>
      <h2>Fires</h2>
      {all.length ? <Table name="Fires" columns={fires} items={all} /> : <p class="quiet">No events yet.</p>}
    </>
  ),
};

function secret(text: string | undefined): string {
  return text ? `Secret (shown only once): ${text}` : "Saved.";
}

const ended = (job: BackgroundJobJson): boolean => !!job.endTime;
const pausedJob = (job: BackgroundJobJson): boolean => job.waiting?.reason === "WAIT_REASON_PAUSED";
const howFar = ({ iterations = 0, missedIterations: missed = 0, definition: { iterationsMax: most = 1 } = {}, progress }: BackgroundJobJson): string => {
  const percent = progress?.fraction === undefined ? "" : `${Math.floor(Number(progress.fraction) * 100)}%`;
  return [most > 1 && `${iterations} of ${most}`, missed && `${missed} missed`, percent, visible(progress?.message ?? "")].filter(Boolean).join(", ");
};
const jobs: Resource<BackgroundJobJson> = {
  path: "background",
  empty: "No background jobs. Long-running and repeated calls appear here.",
  live: true,
  list: async (pageToken, filters) => {
    const page = await pawl.jobs.listJobs({ pageSize: 50, pageToken, openOnly: !filters["all"] });
    return { items: page.jobs ?? [], next: page.nextPageToken };
  },
  filters: [{ name: "all", label: "Include ended", on: true }],
  id: ({ jobId }) => jobId ?? "",
  get: async (jobId) => (await pawl.jobs.getJob({ jobId })).job,
  columns: [
    { name: "Job", of: ({ jobId }) => jobId?.slice(-8) },
    { name: "Tool", of: ({ definition }) => visible(definition?.toolName ?? "") },
    { name: "State", of: (job) => <Badge tone={toneOf(job.state)}>{jobState(job)}</Badge> },
    { name: "Progress", of: howFar },
    { name: "Expected end", of: ({ expectedEndTime }) => time(expectedEndTime) },
    { name: "Next", of: ({ nextTime }) => time(nextTime) },
    { name: "Waiting for", of: ({ waiting }) => cut(waiting?.sentence) },
    { name: "Last result", of: ({ lastResult, failure }) => cut(failure?.message ?? lastResult) },
    { name: "Started", of: ({ createTime }) => time(createTime) },
    { name: "Run", of: ({ jobId }) => runLink(jobId) },
    { name: "Conversation", of: ({ conversationId: id }) => id && <a href={`/c/${id}`}>{id.slice(-8)}</a> },
  ],
  actions: [
    {
      name: "Pause",
      method: "agent.v1.JobService/PauseJob",
      inRows: true,
      when: (job) => !ended(job) && !pausedJob(job),
      run: ({ jobId = "" }) => pawl.jobs.pauseJob({ requestId: requestId(), jobId }),
    },
    {
      name: "Resume",
      method: "agent.v1.JobService/ResumeJob",
      inRows: true,
      when: (job) => !ended(job) && pausedJob(job),
      run: ({ jobId = "" }) => pawl.jobs.resumeJob({ requestId: requestId(), jobId }),
    },
    {
      name: "Stop",
      method: "agent.v1.JobService/StopJob",
      inRows: true,
      when: (job) => !ended(job),
      bad: true,
      ask: "Reason (optional)",
      run: ({ jobId = "" }, reason) => pawl.jobs.stopJob({ requestId: requestId(), jobId, reason }),
    },
  ],
  below: ({ pendingCalls = [] }) => pendingCalls.map((call) => <CallCard key={call.callId} call={call} />),
};

function resolve({ runId = "", callId = "" }: CallJson, resolution: ResolutionJson, content?: unknown): Promise<unknown> {
  const result = content === undefined ? {} : { contentJson: encode(content) };
  return pawl.agent.resolveCall({ requestId: requestId(), runId, callId, resolution, ...result });
}

const resolutions: Action<CallJson>[] = [
  {
    name: "It happened",
    method: "agent.v1.AgentService/ResolveCall",
    ask: "Result as JSON",
    run: (call, text) => resolve(call, "RESOLUTION_HAPPENED", parse(text)),
  },
  { name: "Run it again", method: "agent.v1.AgentService/ResolveCall", bad: true, run: (call) => resolve(call, "RESOLUTION_RUN_AGAIN") },
  { name: "Report to model", method: "agent.v1.AgentService/ResolveCall", run: (call) => resolve(call, "RESOLUTION_TELL_MODEL") },
];

const attention: Resource<RunInNeedJson> = {
  path: "attention",
  empty: "No run needs an operator.",
  list: async (pageToken) => {
    const page = await pawl.operator.listAttention({ pageSize: 50, pageToken });
    return { items: page.runs ?? [], next: page.nextPageToken };
  },
  live: true,
  id: ({ runId }) => runId ?? "",
  get: async (runId) => (await pawl.operator.listAttention({ runId })).runs?.[0],
  columns: [
    { name: "Run", of: ({ runId }) => runId?.slice(-8) },
    { name: "Reason", of: ({ attention: need }) => short(need?.reason, "ATTENTION_REASON_") },
    { name: "Since", of: ({ attention: need }) => time(need?.sinceTime) },
    { name: "Crashes", of: ({ crashCount }) => crashCount || "" },
    { name: "Round", of: ({ round }) => round },
    { name: "User", of: ({ userId }) => userId },
    { name: "Log", of: ({ runId }) => runLink(runId) },
  ],
  actions: [
    {
      name: "Retry",
      method: "agent.v1.OperatorService/RedriveRun",
      ask: "Reason",
      run: async ({ runId = "" }, reason) => {
        await pawl.operator.redriveRun({ requestId: requestId(), runId, reason });
        return GONE;
      },
    },
    {
      name: "End",
      method: "agent.v1.OperatorService/EndRun",
      bad: true,
      ask: "Reason",
      run: async ({ runId = "" }, reason) => {
        await pawl.operator.endRun({ requestId: requestId(), runId, reason });
        return GONE;
      },
    },
  ],
  below: ({ calls = [] }) =>
    calls.map((call) => (
      <div key={call.callId}>
        <CallCard call={call} />
        {call.state === "CALL_STATE_RUNNING" && <Actions item={call} all={resolutions} onDone={() => go("/attention")} />}
      </div>
    )),
};

const notifications: Resource<NotificationJson> = {
  path: "notifications",
  empty: "No notifications yet.",
  list: async (pageToken, filters) => {
    const page = await pawl.notifications.listNotifications({ pageSize: 50, pageToken, onlyUnread: !!filters["unread"] });
    return { items: page.notifications ?? [], next: page.nextPageToken };
  },
  filters: [{ name: "unread", label: "Unread only", on: true }],
  id: ({ notificationId }) => notificationId ?? "",
  columns: [
    { name: "Title", of: ({ title, kind }) => visible(title || short(kind, "NOTIFICATION_KIND_")) },
    { name: "Text", of: ({ body }) => cut(body) },
    { name: "When", of: ({ createTime }) => time(createTime) },
    { name: "Read", of: ({ readTime }) => time(readTime) ?? "unread" },
    { name: "Run", of: ({ runId }) => runLink(runId) },
  ],
  actions: [
    {
      name: "Mark as read",
      method: "notify.v1.NotifyService/AcknowledgeNotifications",
      when: ({ readTime }) => !readTime,
      run: ({ notificationId = "" }) => pawl.notifications.acknowledgeNotifications({ notificationIds: [notificationId] }),
    },
    {
      name: "Mute conversation",
      method: "notify.v1.PreferenceService/MuteConversation",
      when: ({ conversationId }) => !!conversationId,
      run: async ({ conversationId = "" }) => {
        await pawl.preferences.muteConversation({ mute: { conversationId } });
        return "The conversation is muted. Unmute it in the settings.";
      },
    },
  ],
};

const channels: Resource<ChannelJson> = {
  path: "channels",
  declared: ({ name }) => ["channel", name ?? ""],
  empty: "No channels. Create one to receive notifications by webhook or e-mail.",
  list: async () => ({ items: (await pawl.channels.listChannels({})).channels ?? [] }),
  id: ({ channelId }) => channelId ?? "",
  get: async (channelId) => (await pawl.channels.getChannel({ channelId })).channel,
  columns: [
    { name: "Name", of: ({ name, channelId }) => visible(name || channelId || "") },
    { name: "Address", of: ({ url }) => cut(url) },
    { name: "State", of: ({ enabled, disableReason }) => (enabled ? "on" : `off ${visible(disableReason ?? "")}`) },
    { name: "Kinds", of: ({ kinds }) => cut(kinds?.map((kind) => short(kind, "NOTIFICATION_KIND_")).join(", ") || "all") },
    { name: "Failing since", of: ({ failingSinceTime }) => time(failingSinceTime) },
  ],
  make: {
    name: "New channel",
    method: "notify.v1.ChannelService/CreateChannel",
    value: () => ({ name: "", url: "https://", kinds: [], enabled: true }),
    save: async (channel) => secret((await pawl.channels.createChannel({ requestId: requestId(), channel })).secret),
  },
  edit: {
    name: "Edit channel",
    method: "notify.v1.ChannelService/UpdateChannel",
    value: ({ name, url, kinds = [], enabled = false, afterSeconds = 0 }) => ({ name, url, kinds: { kinds }, enabled, afterSeconds }),
    save: async (change, { channelId = "" }) => void (await pawl.channels.updateChannel({ ...change, channelId })),
  },
  actions: [
    {
      name: "Test",
      method: "notify.v1.ChannelService/TestChannel",
      run: async ({ channelId = "" }) => {
        const { delivery } = await pawl.channels.testChannel({ channelId });
        return `Test: ${short(delivery?.state, "CHANNEL_DELIVERY_STATE_")} ${visible(delivery?.lastError ?? "")}`;
      },
    },
    {
      name: "Confirm",
      method: "notify.v1.ChannelService/ConfirmChannel",
      when: ({ url, confirmTime }) => !!url?.startsWith("mailto:") && !confirmTime,
      ask: "Code from the e-mail",
      run: ({ channelId = "" }, code) => pawl.channels.confirmChannel({ channelId, code }),
    },
    {
      name: "Delete",
      method: "notify.v1.ChannelService/DeleteChannel",
      bad: true,
      run: async ({ channelId = "" }) => {
        await pawl.channels.deleteChannel({ channelId });
        return GONE;
      },
    },
  ],
  below: ({ channelId = "" }) => (
    <Below<ChannelDeliveryJson>
      name="Deliveries"
      method="notify.v1.ChannelService/ListDeliveries"
      load={async () => (await pawl.channels.listDeliveries({ channelId })).deliveries}
      columns={[
        { name: "Type", of: ({ type }) => type },
        { name: "State", of: ({ state }) => short(state, "CHANNEL_DELIVERY_STATE_") },
        { name: "Tries", of: ({ tries }) => tries ?? 0 },
        { name: "Last try", of: ({ tryTime }) => time(tryTime) },
        { name: "Status", of: ({ status }) => status || "" },
        { name: "Error", of: ({ lastError }) => cut(lastError) },
      ]}
      act={(delivery, again) => (
        <Actions
          item={delivery}
          onDone={again}
          all={[
            {
              name: "Resend",
              method: "notify.v1.ChannelService/ResendDelivery",
              // Codes are not resent; a new one is sent instead.
              when: ({ type }) => type !== "channel.code",
              run: ({ deliveryId = "" }) => pawl.channels.resendDelivery({ deliveryId }),
            },
          ]}
        />
      )}
    />
  ),
};

const sources: Resource<SourceJson> = {
  path: "sources",
  declared: ({ config }) => ["source", config?.name ?? ""],
  empty: "No sources. Add one with pawl sources add-mcp or add-http.",
  list: async () => ({ items: (await pawl.sources.listSources({})).sources ?? [] }),
  id: ({ config }) => config?.name ?? "",
  columns: [
    { name: "Name", of: ({ config }) => config?.name },
    { name: "State", of: ({ state }) => short(state, "SOURCE_STATE_") },
    { name: "Tools", of: ({ tools: all }) => all?.length ?? 0 },
    { name: "Problem", of: ({ problem }) => cut(problem) },
  ],
  actions: [
    {
      name: "Check",
      method: "tool.v1.SourceService/CheckSource",
      run: async ({ config }) => {
        const { changes = [] } = await pawl.sources.checkSource({ name: config?.name ?? "" });
        return changes.length ? `Changed: ${changes.map(({ toolName }) => toolName).join(", ")}` : "No changes since approval.";
      },
    },
    {
      name: "Remove",
      method: "tool.v1.SourceService/RemoveSource",
      bad: true,
      run: async ({ config }) => {
        await pawl.sources.removeSource({ name: config?.name ?? "" });
        return GONE;
      },
    },
  ],
};

const documents: Resource<DocumentJson> = {
  path: "documents",
  empty: "No documents. Add one with pawl documents add.",
  list: async (pageToken) => {
    const page = await pawl.documents.listDocuments({ pageSize: 100, pageToken });
    return { items: page.documents ?? [], next: page.nextPageToken };
  },
  id: ({ name, owner }) => `${short(owner, "DOCUMENT_OWNER_")}:${name ?? ""}`,
  columns: [
    { name: "Name", of: ({ name }) => visible(name ?? "") },
    { name: "Owner", of: ({ owner }) => short(owner, "DOCUMENT_OWNER_") },
    { name: "Language", of: ({ language }) => language },
    { name: "Bytes", of: ({ textBytes }) => textBytes },
    { name: "Changed", of: ({ updateTime }) => time(updateTime) },
  ],
  actions: [
    {
      name: "Delete",
      method: "tool.v1.DocumentService/DeleteDocument",
      bad: true,
      run: async ({ name = "", owner }) => {
        await pawl.documents.deleteDocument({ name, ...(owner ? { owner } : {}) });
        return GONE;
      },
    },
  ],
};

export const RESOURCES: readonly Resource<any>[] = [
  runs,
  jobs,
  goals,
  workflows,
  attention,
  agents,
  tools,
  rules,
  schedules,
  triggers,
  audit,
  notifications,
  channels,
  sources,
  documents,
];
