/** Definitions of the other list pages: tools, jobs, runs in need, channels and documents. */

import { type BackgroundJobJson, type CallJson, type ChannelDeliveryJson, type ChannelJson, type DocumentJson, requestId, type ToolJson } from "@pawl/client";
import type { VNode } from "preact";

import { inPairs, nameOf } from "./about";
import { type Action, Actions, removal } from "./actions";
import { Fields } from "./approval";
import { agents, Care, sourceOf } from "./editing/agents";
import { rules } from "./editing/rules";
import { schedules } from "./editing/schedules";
import { sources } from "./editing/sources";
import { secret, triggers } from "./editing/triggers";
import { CallCard, jobState } from "./cards";
import { Badge, Fact, Skeleton, toneOf } from "./design/parts";
import { Table } from "./design/table";
import { Checks, type FieldSpec, type Values } from "./fields";
import type { Schema } from "./form";
import { cut, plain, runLink, sentence, short, span, time } from "./format";
import { goals } from "./goals";
import { unpack } from "./json";
import KINDS from "./kinds.json";
import { attention } from "./operate/attention";
import { audit } from "./operate/audit";
import { notifications } from "./operate/notifications";
import { Below, paged, type Resource, useRead } from "./resource";
import { runs, State } from "./runs";
import { argumentsOf, entriesOf, objectOf, resultLine, title } from "./sentence";
import { ago, attempt, lasted, may, pawl, titleOf, word } from "./state";
import { visible } from "./visible";
import { workflows } from "./workflows";

const EFFECTS: Record<string, [name: string, hint: string]> = {
  EFFECT_CLASS_READ_ONLY: ["Reads only", "It changes nothing."],
  EFFECT_CLASS_IDEMPOTENT: ["Can be repeated", "A repeated call has no further effect. Pawl retries it after a crash."],
  EFFECT_CLASS_RECONCILABLE: ["Can be checked", "After a crash, Pawl checks whether the call took effect."],
  EFFECT_CLASS_AT_MOST_ONCE: ["At most once", "Pawl never repeats a call. After a crash, a person reports whether it took effect."],
};
const CARES: [string, string][] = [["", "All"], ["SENSITIVE", "Asks first"], ["DESTRUCTIVE", "Destructive"], ["SAFE", "Safe"]];
const listTools = async (pageToken = ""): Promise<{ items: ToolJson[]; next?: string | undefined }> => {
  const page = await pawl.tools.listTools({ pageSize: 200, pageToken });
  return { items: page.tools ?? [], next: page.nextPageToken };
};

const tools: Resource<ToolJson> = {
  path: "tools",
  lead: "Tools are the actions available to agents. Those that ask first or destroy need an approval for each call, unless a rule says otherwise.",
  empty: "No matching tools. Workers and sources provide tools.",
  list: async (pageToken, { words = "", care = "" }) => {
    const { items, next } = await listTools(pageToken);
    const fits = ({ definition }: ToolJson): boolean => `${definition?.name} ${definition?.description}`.toLowerCase().includes(words.toLowerCase()) && (definition?.category ?? "").endsWith(care);
    return { items: items.filter(fits), next };
  },
  tabs: {
    name: "care",
    all: CARES,
    counts: async () => {
      const { items } = await listTools();
      return Object.fromEntries(CARES.map(([care]) => [care, String(items.filter(({ definition }) => definition?.category?.endsWith(care)).length)]));
    },
  },
  filters: [{ name: "words", label: "Search" }],
  id: ({ definition }) => definition?.name ?? "",
  get: async (name) => (await pawl.tools.getTool({ name })).tool,
  about: ({ definition }) => definition?.description,
  columns: [
    { name: "Name", of: ({ definition }) => definition?.name, under: ({ definition }) => cut(definition?.description) },
    { name: "Approval", size: 120, priority: 1, of: ({ definition }) => <Care category={definition?.category} /> },
    { name: "Effect", size: 150, priority: 2, of: ({ definition: { effectClass = "" } = {} }) => <span title={EFFECTS[effectClass]?.[1]}>{EFFECTS[effectClass]?.[0]}</span> },
    { name: "Source", size: 130, priority: 1, num: true, of: sourceOf },
    { name: "Version", detailed: true, of: ({ version }) => version && `v${version}` },
  ],
  actions: [{ ...removal<ToolJson>("Remove", "tool.v1.ToolService/UnregisterTool", ({ definition }) => pawl.tools.unregisterTool({ name: definition?.name ?? "" })), when: ({ source }) => source === "store" }],
  below: ({ definition }) => (
    <>
      <p class="quiet">{EFFECTS[definition?.effectClass ?? ""]?.[1]}</p>
      <Arguments of={definition} />
      <Calls tool={definition?.name ?? ""} />
    </>
  ),
};

/** How a tool was used: its agents, calls and approvals. */
function Calls({ tool }: { tool: string }): VNode | null {
  const [found] = useRead(async () => {
    const [figures, { agents: all = [] }] = await Promise.all([may("tool.v1.AuditService/GetToolAnalytics") ? pawl.audit.getToolAnalytics({ toolName: tool }) : undefined, pawl.agents.listAgents({ pageSize: 200 })]);
    return { figures: figures?.tools?.[0] ?? {}, users: all.filter(({ toolNames }) => toolNames?.includes(tool)) };
  });
  if (!found) return null;
  const { figures: each, users } = found;
  const shown: Record<string, unknown> = {
    Calls: <a href={`/audit?tool=${encodeURIComponent(tool)}`}>{each.executionCount ?? 0}</a>,
    Failed: each.errorCount,
    "From the cache": each.cachedCount,
    "Median duration": each.executionCount && lasted(Number(each.p50Seconds ?? 0)),
    "95% within": each.executionCount && lasted(Number(each.p95Seconds ?? 0)),
    "Approvals asked": each.approvalAskedCount && <a href="/inbox">{each.approvalAskedCount}</a>,
    Approved: each.approvedCount,
    Edited: each.editedCount,
    Rejected: each.rejectedCount,
  };
  return (
    <>
      <h2>Use</h2>
      <dl class="facts inline">{Object.entries(shown).map(([name, value]) => <Fact key={name} name={name} value={value} />)}</dl>
      <div class="chips">
        <span class="quiet">Used by</span>
        {users.map(({ definition: { name = "" } = {} }) => <a key={name} class="chip" href={`/agents/${name}`}>{name}</a>)}
        <span class="quiet">{users.length ? "" : "agents without a list of tools"}</span>
      </div>
    </>
  );
}

const typeOf = ({ type, items, anyOf, enum: values }: Schema = {}): string =>
  values ? `one of ${values.join(", ")}` : anyOf ? anyOf.map(typeOf).filter((each) => each !== "null").join(" or ") : type === "array" ? `list of ${items?.type === "string" ? "text" : (items?.type ?? "values")}` : { string: "text", boolean: "yes or no" }[String(type)] ?? String(type ?? "any");

/** The arguments of a tool, those that are required first. */
function Arguments({ of: definition }: { of: ToolJson["definition"] }): VNode | null {
  const schema = unpack({ argumentsSchemaJson: definition?.argumentsSchemaJson }).argumentsSchemaJson as Schema | undefined;
  const required = schema?.required ?? [];
  const names = [...new Set([...required, ...Object.keys(schema?.properties ?? {})])];
  if (!names.length) return null;
  return (
    <>
      <h2>Arguments</h2>
      <Table
        name="Arguments"
        items={names}
        columns={[
          { name: "Name", size: 460, of: (name) => <><code>{visible(name)}</code>{required.includes(name) && <span class="quiet"> required</span>}</>, under: (name) => <span class="whole">{cut(schema?.properties?.[name]?.description)}</span> },
          { name: "Type", priority: 1, of: (name) => typeOf(schema?.properties?.[name]) },
        ]}
      />
    </>
  );
}

const ended = (job: BackgroundJobJson): boolean => !!job.endTime;
const pausedJob = (job: BackgroundJobJson): boolean => job.waiting?.reason === "WAIT_REASON_PAUSED";
function Progress({ job: { iterations = 0, missedIterations: missed = 0, definition: { iterationsMax: most = 1 } = {}, progress, endTime, nextTime } }: { job: BackgroundJobJson }): VNode {
  const done = progress?.fraction === undefined ? (most > 1 ? iterations / most : undefined) : Number(progress.fraction);
  const words = [most > 1 && `${iterations} of ${most}`, missed && `${missed} missed`, most === 1 && done !== undefined && !progress?.message?.includes("%") && `${Math.floor(done * 100)}%`, visible(progress?.message ?? ""), !endTime && nextTime && `next ${ago(nextTime)}`, endTime && `ended ${ago(endTime)}`].filter(Boolean).join(" · ");
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
  return <Checks all={Object.entries(KINDS)} chosen={isList ? kinds : kinds?.kinds} onChosen={(chosen) => onValue({ ...rest, kinds: isList ? chosen : { kinds: chosen } })} />;
}

const CHANNEL: FieldSpec[] = [
  { at: "name", label: "Name" },
  { at: "url", label: "Address", hint: "https://... for a webhook, mailto:... for an e-mail address." },
  { at: "enabled", label: "Send notifications to this channel", kind: "check" },
  { at: "kinds", label: "Sends a notification when", kind: "own", view: (props) => <KindPicker {...props} /> },
  { at: "afterSeconds", label: "Delay (seconds)", kind: "number", half: true, hint: "Notifications that are read before then are not sent." },
];

// Codes are not resent; a new one is sent instead.
const RESEND: Action<ChannelDeliveryJson> = { name: "Resend", method: "notify.v1.ChannelService/ResendDelivery", when: ({ type, state }) => type !== "channel.code" && state !== "CHANNEL_DELIVERY_STATE_DELIVERED", run: ({ deliveryId = "" }) => pawl.channels.resendDelivery({ deliveryId }) };

const deliveryState = ({ state }: ChannelDeliveryJson): VNode => <Badge tone={state?.endsWith("DEAD") ? "bad" : toneOf(state)}>{short(state, "CHANNEL_DELIVERY_STATE_").replace("dead", "given up").replace("waiting", "will be retried")}</Badge>;

function LastDelivery({ channelId }: { channelId: string }): VNode | null {
  const [found] = useRead(() => pawl.channels.listDeliveries({ channelId }));
  const [last] = found?.deliveries ?? [];
  if (!last) return found ? <span class="quiet">none</span> : null;
  return <>{deliveryState(last)} <small class="quiet">{time(last.tryTime ?? last.createTime)}</small></>;
}

const channels: Resource<ChannelJson> = {
  path: "channels",
  lead: "A channel sends your notifications to an address: a webhook or an e-mail address.",
  declared: ({ name }) => ["channel", name ?? ""],
  empty: "No channels. Create one to receive notifications by webhook or e-mail.",
  list: async () => ({ items: (await pawl.channels.listChannels({})).channels ?? [] }),
  id: ({ channelId }) => channelId ?? "", title: ({ name, url = "" }) => name || url,
  firsts: [
    ["Webhook", "Each notification is sent to a URL with a signature.", { name: "", url: "https://", kinds: [], enabled: true }],
    ["E-mail", "Notifications arrive in your mailbox, after you confirm the address.", { name: "", url: "mailto:", kinds: [], enabled: true }],
  ],
  get: async (channelId) => (await pawl.channels.getChannel({ channelId })).channel,
  columns: [
    { name: "Name", icon: ({ url }) => (url?.startsWith("mailto:") ? "mail" : "channels"), of: ({ name, channelId }) => name || channelId, under: ({ url }) => cut(url) },
    { name: "Address", detailed: true, of: ({ url }) => cut(url) },
    { name: "Sends", priority: 2, of: ({ kinds = [] }) => cut(kinds.map((kind) => sentence(short(kind, "NOTIFICATION_KIND_"))).join(", ") || "All kinds") },
    { name: "State", size: 130, priority: 1, of: ({ enabled, failingSinceTime }) => <Badge tone={!enabled ? "grey" : failingSinceTime ? "bad" : "ok"}>{!enabled ? "off" : failingSinceTime ? "failing" : "on"}</Badge> },
    { name: "Failing since", detailed: true, of: ({ failingSinceTime }) => time(failingSinceTime) },
    { name: "Switched off", detailed: true, of: ({ enabled, disableReason }) => !enabled && cut(disableReason) },
    { name: "Last delivery", size: 200, priority: 1, listed: true, of: ({ channelId = "" }) => <LastDelivery channelId={channelId} /> },
  ],
  make: {
    name: "New channel", method: "notify.v1.ChannelService/CreateChannel", value: () => ({ name: "", url: "https://", kinds: [], enabled: true }), fields: CHANNEL,
    save: async (channel) => secret((await pawl.channels.createChannel({ requestId: requestId(), channel })).secret),
  },
  edit: {
    name: "Edit channel", method: "notify.v1.ChannelService/UpdateChannel",
    value: ({ name, url, kinds = [], enabled = false, afterSeconds = 0 }) => ({ name, url, kinds: { kinds }, enabled, afterSeconds }), fields: CHANNEL,
    save: async (change, { channelId = "" }) => void (await pawl.channels.updateChannel({ ...change, channelId })),
  },
  actions: [
    {
      name: "Test", method: "notify.v1.ChannelService/TestChannel",
      run: async ({ channelId = "" }) => {
        const { delivery } = await pawl.channels.testChannel({ channelId });
        return `Test: ${short(delivery?.state, "CHANNEL_DELIVERY_STATE_")} ${visible(delivery?.lastError ?? "")}`;
      },
    },
    { name: "Confirm", method: "notify.v1.ChannelService/ConfirmChannel", when: ({ url, confirmTime }) => !!url?.startsWith("mailto:") && !confirmTime, ask: "Code from the e-mail", run: ({ channelId = "" }, code) => pawl.channels.confirmChannel({ channelId, code }) },
    removal("Delete", "notify.v1.ChannelService/DeleteChannel", ({ channelId = "" }) => pawl.channels.deleteChannel({ channelId })),
  ],
  below: ({ channelId = "" }) => (
    <Below<ChannelDeliveryJson & { title: string | undefined }>
      name="Deliveries"
      method="notify.v1.ChannelService/ListDeliveries"
      load={async () => {
        const [{ deliveries = [] }, { notifications: all = [] }] = await Promise.all([pawl.channels.listDeliveries({ channelId }), pawl.notifications.listNotifications({ pageSize: 200 })]);
        return deliveries.map((each) => ({ ...each, title: all.find(({ number }) => number === each.number)?.title }));
      }}
      columns={[
        { name: "Notification", of: ({ type = "", title: said }) => said ?? sentence(type.replace(/[._]/g, " ")), under: ({ lastError, type = "", title: said }) => (lastError ? <span class="fault">{cut(lastError)}</span> : said && sentence(type.replace(/[._]/g, " "))) },
        { name: "State", size: 150, priority: 1, of: deliveryState },
        { name: "Tries", size: 70, num: true, priority: 2, of: ({ tries }) => tries ?? 0 },
        { name: "Status", size: 80, num: true, priority: 3, of: ({ status }) => status || "" },
        { name: "Last try", size: 110, priority: 1, num: true, of: ({ tryTime }) => time(tryTime) },
      ]}
      act={(delivery, again) => <Actions item={delivery} onDone={again} all={[RESEND]} />}
    />
  ),
};

const PUT = "tool.v1.DocumentService/PutDocument";
const isOfStore = ({ owner }: DocumentJson): boolean => owner === "DOCUMENT_OWNER_STORE";
const keyOf = ({ name = "", owner }: DocumentJson): string => `${short(owner, "DOCUMENT_OWNER_")}:${name}`;
const sizeOf = ({ textBytes }: DocumentJson): string => `${Math.ceil(Number(textBytes ?? 0) / 1024).toLocaleString()} KB`;

function readDocument(key: string): ReturnType<typeof pawl.documents.getDocument> {
  const [owner = "", ...name] = key.split(":");
  return pawl.documents.getDocument({ name: name.join(":"), owner: owner === "store" ? "DOCUMENT_OWNER_STORE" : "DOCUMENT_OWNER_USER" });
}

/** The text of a document, or its first words. */
function Text({ of: document, isWhole }: { of: DocumentJson; isWhole?: true }): VNode | null {
  const [found] = useRead(() => readDocument(keyOf(document)), [document.textSha256]);
  if (!found) return isWhole ? <Skeleton /> : null;
  return isWhole ? <p class="panel prose document" tabIndex={0}>{visible(found.text ?? "")}</p> : <>{plain(cut(found.text?.replace(/^#.*\n/, "")))}</>;
}

/** Uploads text files as documents with their names. */
function Upload({ onDone }: { onDone: () => void }): VNode | null {
  const put = (files: FileList | null): void =>
    void attempt(async () => {
      for (const file of files ?? []) await pawl.documents.putDocument({ name: file.name, text: await file.text() });
      onDone();
    });
  return may(PUT) ? <label class="button second">Upload <input type="file" class="unseen" multiple accept="text/*,.md,.json,.csv" onChange={(event) => put(event.currentTarget.files)} /></label> : null;
}

const documents: Resource<DocumentJson> = {
  path: "documents",
  lead: "Texts that agents can list, read and search.",
  empty: "No matching documents. Upload text files, or write one.",
  list: async (pageToken, { words = "" }) => {
    const { documents: all = [], nextPageToken } = await pawl.documents.listDocuments({ pageSize: 100, pageToken });
    return { items: all.filter(({ name = "" }) => name.toLowerCase().includes(words.toLowerCase())), next: nextPageToken };
  },
  filters: [{ name: "words", label: "Search" }],
  id: keyOf, title: ({ name = "" }) => name,
  above: (reload) => <Upload onDone={reload} />,
  columns: [
    { name: "Name", icon: () => "documents", of: ({ name }) => name, under: (each) => <Text of={each} /> },
    { name: "For", size: 110, priority: 1, of: (each) => (isOfStore(each) ? "Everyone" : <span class="quiet">You</span>) },
    { name: "Size", size: 90, num: true, priority: 2, of: sizeOf },
    { name: "Changed", size: 120, priority: 1, num: true, of: ({ updateTime }) => time(updateTime) },
  ],
  make: {
    name: "New document", method: PUT, plain: true, value: () => ({ name: "", text: "", owner: "DOCUMENT_OWNER_USER" }),
    fields: [
      { at: "name", label: "Name", half: true, placeholder: "refund-policy.md", hint: "An existing document with this name is replaced." },
      { at: "owner", label: "Who can read it", kind: "select", half: true, options: [["DOCUMENT_OWNER_USER", "Only you and your agents"], ["DOCUMENT_OWNER_STORE", "Everyone in the store (needs the role admin)"]] },
      { at: "text", label: "Text", kind: "area", hint: "Markdown or plain text." },
    ],
    save: async (document) => void (await pawl.documents.putDocument(document)),
  },
  actions: [removal("Delete", "tool.v1.DocumentService/DeleteDocument", ({ name = "", owner }) => pawl.documents.deleteDocument({ name, ...(owner ? { owner } : {}) }))],
  below: (document) => <Text of={document} isWhole />,
};

export const RESOURCES: readonly Resource<any>[] = [runs, jobs, goals, workflows, attention, agents, tools, rules, schedules, triggers, audit, notifications, channels, sources, documents];
