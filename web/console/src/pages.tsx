/** Definitions of the other list pages: tools, jobs, runs in need, channels and documents. */

import { type BackgroundJobJson, type CallJson, type ChannelDeliveryJson, type ChannelJson, type DocumentJson, requestId, type ToolFiguresJson, type ToolJson } from "@pawl/client";
import type { VNode } from "preact";

import { inPairs, nameOf } from "./about";
import { type Action, Actions, removal } from "./actions";
import { Fields } from "./approval";
import { agents, Care } from "./editing/agents";
import { rules } from "./editing/rules";
import { schedules } from "./editing/schedules";
import { sources } from "./editing/sources";
import { secret, triggers } from "./editing/triggers";
import { CallCard, jobState } from "./cards";
import { Badge, toneOf } from "./design/parts";
import { type Column, Table } from "./design/table";
import { Checks, type FieldSpec, type Values } from "./fields";
import type { Schema } from "./form";
import { cut, runLink, short, span, time } from "./format";
import { goals } from "./goals";
import { unpack } from "./json";
import { KINDS } from "./kinds";
import { attention } from "./operate/attention";
import { audit } from "./operate/audit";
import { notifications } from "./operate/notifications";
import { Below, paged, type Resource } from "./resource";
import { Fact, runs, State } from "./runs";
import { argumentsOf, entriesOf, objectOf, resultLine, title } from "./sentence";
import { ago, lasted, pawl, titleOf, word } from "./state";
import { visible } from "./visible";
import { workflows } from "./workflows";

const figures: Column<ToolFiguresJson>[] = [
  { name: "Calls", num: true, of: (each) => each.executionCount ?? 0 },
  { name: "Errors", num: true, of: (each) => each.errorCount ?? 0 },
  { name: "Cached", num: true, priority: 3, of: (each) => each.cachedCount ?? 0 },
  { name: "p50", num: true, priority: 2, of: (each) => each.executionCount && lasted(Number(each.p50Seconds ?? 0)) },
  { name: "p95", num: true, priority: 2, of: (each) => each.executionCount && lasted(Number(each.p95Seconds ?? 0)) },
  { name: "Approvals asked", num: true, priority: 3, of: (each) => each.approvalAskedCount ?? 0 },
  { name: "Approved", num: true, of: (each) => each.approvedCount ?? 0 },
  { name: "Edited", num: true, of: (each) => each.editedCount ?? 0 },
  { name: "Rejected", num: true, of: (each) => each.rejectedCount ?? 0 },
];

const EFFECTS: Record<string, string> = {
  EFFECT_CLASS_READ_ONLY: "reads only",
  EFFECT_CLASS_IDEMPOTENT: "can be repeated",
  EFFECT_CLASS_RECONCILABLE: "can be checked",
  EFFECT_CLASS_AT_MOST_ONCE: "at most once",
};

const tools: Resource<ToolJson> = {
  path: "tools",
  lead: "Tools are the actions available to agents. Sensitive and destructive tools require approval.",
  empty: "No tools. Workers and sources provide tools.",
  list: async (pageToken, { words = "" }) => {
    const page = await pawl.tools.listTools({ pageSize: 200, pageToken });
    const fits = ({ definition }: ToolJson): boolean => `${definition?.name} ${definition?.description}`.toLowerCase().includes(words.toLowerCase());
    return { items: (page.tools ?? []).filter(fits), next: page.nextPageToken };
  },
  filters: [{ name: "words", label: "Name or description" }],
  id: ({ definition }) => definition?.name ?? "",
  get: async (name) => (await pawl.tools.getTool({ name })).tool,
  columns: [
    { name: "Name", of: ({ definition }) => definition?.name, under: ({ definition }) => cut(definition?.description) },
    { name: "Approval", size: 120, of: ({ definition }) => <Care category={definition?.category} /> },
    { name: "Effect", size: 130, priority: 3, of: ({ definition }) => EFFECTS[definition?.effectClass ?? ""] },
    { name: "Source", size: 150, priority: 2, of: ({ source }) => source },
    { name: "Version", size: 80, priority: 3, of: ({ version }) => version && `v${version}` },
  ],
  edit: {
    name: "Edit tool",
    method: "tool.v1.ToolService/RegisterTool",
    // Tools of workers and sources are defined there.
    when: ({ source }) => source === "store",
    value: ({ definition }) => definition,
    save: async (definition) => void (await pawl.tools.registerTool({ definition, replace: true })),
  },
  actions: [{ ...removal<ToolJson>("Remove", "tool.v1.ToolService/UnregisterTool", ({ definition }) => pawl.tools.unregisterTool({ name: definition?.name ?? "" })), when: ({ source }) => source === "store" }],
  below: ({ definition }) => (
    <>
    <p class="lead">{visible(definition?.description ?? "")}</p>
    <Arguments of={definition} />
    <Below<ToolFiguresJson>
      name="Statistics"
      method="tool.v1.AuditService/GetToolAnalytics"
      load={async () => (await pawl.audit.getToolAnalytics({ toolName: definition?.name ?? "" })).tools}
      columns={figures}
    />
    </>
  ),
};

function Arguments({ of: definition }: { of: ToolJson["definition"] }): VNode | null {
  const schema = unpack({ argumentsSchemaJson: definition?.argumentsSchemaJson }).argumentsSchemaJson as Schema | undefined;
  const names = Object.keys(schema?.properties ?? {});
  if (!names.length) return null;
  return (
    <>
      <h2>Arguments</h2>
      <Table
        name="Arguments"
        items={names}
        columns={[
          { name: "Name", size: 190, of: (name) => <><code>{visible(name)}</code>{schema?.required?.includes(name) && <span class="quiet"> required</span>}</> },
          { name: "Type", size: 110, of: (name) => String(schema?.properties?.[name]?.type ?? "") },
          { name: "Description", priority: 2, of: (name) => cut(schema?.properties?.[name]?.description) },
        ]}
      />
    </>
  );
}

const ended = (job: BackgroundJobJson): boolean => !!job.endTime;
const pausedJob = (job: BackgroundJobJson): boolean => job.waiting?.reason === "WAIT_REASON_PAUSED";
function Progress({ job: { iterations = 0, missedIterations: missed = 0, definition: { iterationsMax: most = 1 } = {}, progress, endTime, nextTime } }: { job: BackgroundJobJson }): VNode {
  const done = progress?.fraction === undefined ? (most > 1 ? iterations / most : undefined) : Number(progress.fraction);
  const words = [most > 1 && `${iterations} of ${most}`, missed && `${missed} missed`, most === 1 && done !== undefined && !progress?.message?.includes("%") && `${Math.floor(done * 100)}%`, visible(progress?.message ?? ""), !endTime && nextTime && `next ${ago(nextTime)}`].filter(Boolean).join(" · ");
  return <span class="progress">{done !== undefined && !endTime && <progress value={done} max={1} aria-label="Progress" />} <small>{words}</small></span>;
}
const jobs: Resource<BackgroundJobJson> = {
  path: "background",
  lead: "Long-running and repeated calls in the background.",
  empty: "No open background jobs. Long-running and repeated calls appear here.",
  live: true,
  list: paged("jobs", (page, filters) => pawl.jobs.listJobs({ ...page, openOnly: !filters["all"] })),
  tabs: { name: "all", all: [["", "Open"], ["1", "All"]] },
  id: ({ jobId }) => jobId ?? "",
  get: async (jobId) => (await pawl.jobs.getJob({ jobId })).job,
  title: ({ definition }) => title(definition?.toolName),
  columns: [
    { name: "Job", icon: () => "background", of: ({ definition }) => title(definition?.toolName), under: ({ definition, failure }) => (failure ? <span class="fault">{cut(failure.message || failure.reason)}</span> : objectOf(definition ?? {})) },
    { name: "State", size: 148, priority: 1, of: (job) => (job.notStopped ? <Badge tone="bad">{jobState(job)}</Badge> : <State run={job} />) },
    { name: "Progress", size: 300, priority: 1, of: (job) => <Progress job={job} /> },
    { name: "Last result", detailed: true, of: ({ lastResult, failure }) => cut(failure?.message ?? inPairs(lastResult)) },
    { name: "Repeats", detailed: true, of: ({ definition: { intervalSeconds = 0, iterationsMax = 1 } = {} }) => Number(intervalSeconds) > 0 && `every ${span(Number(intervalSeconds))}, ${iterationsMax} times at most` },
    { name: "Started", size: 112, priority: 3, of: ({ createTime }) => time(createTime) },
  ],
  actions: [
    { name: "Pause", method: "agent.v1.JobService/PauseJob", inRows: true, when: (job) => !ended(job) && !pausedJob(job), run: ({ jobId = "" }) => pawl.jobs.pauseJob({ requestId: requestId(), jobId }) },
    { name: "Resume", method: "agent.v1.JobService/ResumeJob", inRows: true, when: (job) => !ended(job) && pausedJob(job), run: ({ jobId = "" }) => pawl.jobs.resumeJob({ requestId: requestId(), jobId }) },
    { name: "Stop", method: "agent.v1.JobService/StopJob", inRows: true, when: (job) => !ended(job), bad: true, ask: "Reason (optional)", run: ({ jobId = "" }, reason) => pawl.jobs.stopJob({ requestId: requestId(), jobId, reason }) },
  ],
  below: ({ pendingCalls = [], waiting, expectedEndTime, conversationId, jobId = "", definition }) => (
    <>
      <dl class="facts">
        <Fact name="Waiting for" value={waiting?.reason !== "WAIT_REASON_TIME" && waiting?.sentence && visible(waiting.sentence)} />
        <Fact name="Expected end" value={time(expectedEndTime)} />
        <Fact name="Run" value={runLink(jobId, "Open the run")} />
        <Fact name="Reports to" value={conversationId && <a href={`/c/${conversationId}`}>{nameOf(titleOf(conversationId))}</a>} />
      </dl>
      {definition && <><h2>Arguments</h2><Fields all={entriesOf(argumentsOf(definition))} /></>}
      {pendingCalls.map((call) => <CallCard key={call.callId} call={call} />)}
      <Below<CallJson>
        name="Calls"
        method="agent.v1.AgentService/ListCalls"
        load={async () => (await pawl.agent.listCalls({ runId: jobId, pageSize: 200 })).calls?.toReversed()}
        columns={[
          { name: "Result", of: (call) => resultLine(call) || word(call.state) },
          { name: "State", size: 130, of: ({ state }) => <Badge tone={toneOf(state)}>{word(state)}</Badge> },
          { name: "When", size: 120, of: ({ createTime }) => time(createTime) },
        ]}
      />
    </>
  ),
};

/** In a change, the kinds are a message of their own. */
function KindPicker({ value: { kinds, ...rest }, onValue }: { value: Values; onValue: (value: Values) => void }): VNode {
  const isList = Array.isArray(kinds);
  return <Checks all={KINDS} chosen={isList ? kinds : kinds?.kinds} onChosen={(chosen) => onValue({ ...rest, kinds: isList ? chosen : { kinds: chosen } })} />;
}

const CHANNEL: FieldSpec[] = [
  { at: "name", label: "Name" },
  { at: "url", label: "Address", hint: "https://... for a webhook, mailto:... for an e-mail address." },
  { at: "kinds", label: "Sends a notification when", kind: "own", view: (props) => <KindPicker {...props} /> },
  { at: "enabled", label: "Send notifications to this channel", kind: "check" },
  { at: "afterSeconds", label: "Delay (seconds)", kind: "number", half: true, hint: "Notifications that are read before then are not sent." },
];

// Codes are not resent; a new one is sent instead.
const RESEND: Action<ChannelDeliveryJson> = { name: "Resend", method: "notify.v1.ChannelService/ResendDelivery", when: ({ type }) => type !== "channel.code", run: ({ deliveryId = "" }) => pawl.channels.resendDelivery({ deliveryId }) };

const channels: Resource<ChannelJson> = {
  path: "channels",
  lead: "A channel sends your notifications to an address: a webhook or an e-mail address.",
  declared: ({ name }) => ["channel", name ?? ""],
  empty: "No channels. Create one to receive notifications by webhook or e-mail.",
  list: async () => ({ items: (await pawl.channels.listChannels({})).channels ?? [] }),
  id: ({ channelId }) => channelId ?? "",
  get: async (channelId) => (await pawl.channels.getChannel({ channelId })).channel,
  columns: [
    { name: "Name", of: ({ name, channelId }) => name || channelId },
    { name: "Address", of: ({ url }) => cut(url) },
    { name: "State", size: 150, of: ({ enabled, disableReason }) => (enabled ? <Badge tone="ok">on</Badge> : <Badge>off {visible(disableReason ?? "")}</Badge>) },
    { name: "Kinds", priority: 3, of: ({ kinds }) => cut(kinds?.map((kind) => short(kind, "NOTIFICATION_KIND_")).join(", ") || "all") },
    { name: "Failing since", size: 120, priority: 2, of: ({ failingSinceTime }) => time(failingSinceTime) },
  ],
  make: {
    name: "New channel",
    method: "notify.v1.ChannelService/CreateChannel",
    value: () => ({ name: "", url: "https://", kinds: [], enabled: true }),
    fields: CHANNEL,
    save: async (channel) => secret((await pawl.channels.createChannel({ requestId: requestId(), channel })).secret),
  },
  edit: {
    name: "Edit channel",
    method: "notify.v1.ChannelService/UpdateChannel",
    value: ({ name, url, kinds = [], enabled = false, afterSeconds = 0 }) => ({ name, url, kinds: { kinds }, enabled, afterSeconds }),
    fields: CHANNEL,
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
    { name: "Confirm", method: "notify.v1.ChannelService/ConfirmChannel", when: ({ url, confirmTime }) => !!url?.startsWith("mailto:") && !confirmTime, ask: "Code from the e-mail", run: ({ channelId = "" }, code) => pawl.channels.confirmChannel({ channelId, code }) },
    removal("Delete", "notify.v1.ChannelService/DeleteChannel", ({ channelId = "" }) => pawl.channels.deleteChannel({ channelId })),
  ],
  below: ({ channelId = "" }) => (
    <Below<ChannelDeliveryJson>
      name="Deliveries"
      method="notify.v1.ChannelService/ListDeliveries"
      load={async () => (await pawl.channels.listDeliveries({ channelId })).deliveries}
      columns={[
        { name: "Type", of: ({ type }) => type },
        { name: "State", size: 120, of: ({ state }) => short(state, "CHANNEL_DELIVERY_STATE_") },
        { name: "Tries", size: 70, num: true, priority: 2, of: ({ tries }) => tries ?? 0 },
        { name: "Last try", size: 110, priority: 2, of: ({ tryTime }) => time(tryTime) },
        { name: "Status", size: 80, priority: 3, of: ({ status }) => status || "" },
        { name: "Error", priority: 3, of: ({ lastError }) => cut(lastError) },
      ]}
      act={(delivery, again) => <Actions item={delivery} onDone={again} all={[RESEND]} />}
    />
  ),
};

const documents: Resource<DocumentJson> = {
  path: "documents",
  lead: "Texts that agents can search.",
  empty: "No documents. Add one with pawl documents add.",
  list: paged("documents", (page) => pawl.documents.listDocuments(page)),
  id: ({ name, owner }) => `${short(owner, "DOCUMENT_OWNER_")}:${name ?? ""}`,
  columns: [
    { name: "Name", of: ({ name }) => name, under: ({ owner }) => owner === "DOCUMENT_OWNER_STORE" && "Of the store, for all its users" },
    { name: "Size", size: 110, num: true, of: ({ textBytes }) => `${Math.ceil(Number(textBytes ?? 0) / 1024).toLocaleString()} KB` },
    { name: "Changed", size: 120, priority: 2, of: ({ updateTime }) => time(updateTime) },
  ],
  actions: [removal("Delete", "tool.v1.DocumentService/DeleteDocument", ({ name = "", owner }) => pawl.documents.deleteDocument({ name, ...(owner ? { owner } : {}) }))],
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
