/** Triggers: their list, the form for webhooks and mailboxes, and the address of a webhook. */

import { requestId, type ScheduleFireJson, type TriggerJson } from "@pawl/client";
import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon } from "../design/icons";
import { Badge } from "../design/parts";
import { Table } from "../design/table";
import { Choice, type FieldSpec, type Values } from "../fields";
import { cut, short } from "../format";
import type { Resource } from "../resource";
import { pawl, who } from "../state";
import { visible } from "../visible";
import { cleaned, fires, lifeOf, OVERLAPS, paused, STARTS } from "./schedules";

const SIGNATURE = "WEBHOOK_AUTHENTICATION_SIGNATURE";
const isMailbox = ({ mailbox }: Values): boolean => !!mailbox;
const isWebhook = ({ mailbox }: Values): boolean => !mailbox;

function Source({ value, onValue, id }: { value: Values; onValue: (value: Values) => void; id: string }): VNode {
  const choose = (to: string): void => {
    const { webhook: _, mailbox: __, ...rest } = value;
    onValue(to === "mailbox" ? { ...rest, mailbox: { host: "", username: "", passwordSecret: "" } } : { ...rest, webhook: { authentication: SIGNATURE } });
  };
  return (
    <Choice
      name={`${id}-source`}
      value={value["mailbox"] ? "mailbox" : "webhook"}
      onValue={choose}
      all={[
        ["webhook", "A webhook: each request to an address starts a run"],
        ["mailbox", "A mailbox: each new e-mail starts a run (needs the role admin)"],
      ]}
    />
  );
}

const FIELDS: FieldSpec[] = [
  {
    at: "webhook.authentication",
    label: "How the sender authenticates",
    kind: "select",
    options: [[SIGNATURE, "It signs each request (Standard Webhooks)"], ["WEBHOOK_AUTHENTICATION_BEARER", "It sends the secret in a header"]],
    when: isWebhook,
  },
  { at: "mailbox.host", label: "Host", half: true, placeholder: "imap.example.com", when: isMailbox },
  { at: "mailbox.username", label: "User name", half: true, when: isMailbox },
  { at: "mailbox.passwordSecret", label: "Name of the password", half: true, hint: "One of the store's passwords.", when: isMailbox },
  { at: "mailbox.folder", label: "Folder", half: true, placeholder: "INBOX", when: isMailbox },
  { at: "mailbox.senders", label: "Accepted senders", kind: "lines", half: true, hint: "Addresses or domains such as @example.com.", when: isMailbox },
  { at: "mailbox.authservId", label: "Server that checks senders", half: true, hint: "Only e-mails that passed DMARC there.", when: isMailbox },
  ...STARTS,
  { at: "text", label: "Message", kind: "area", hint: "Starts each run. The event replaces {{event}}.", when: ({ workflow }) => !workflow },
  { at: "overlap", label: "If the previous run has not ended", kind: "select", half: true, options: OVERLAPS },
  { at: "debounceSeconds", label: "Combine events within (seconds)", kind: "number", half: true, placeholder: "0", hint: "Only the last of them starts a run." },
  { at: "conversationPointer", label: "Conversation by", more: true, half: true, placeholder: "/order/id", hint: "Events with the same value there share a conversation.", when: ({ workflow }) => !workflow },
  { at: "concurrencyPointer", label: "Take turns by", more: true, half: true, placeholder: "/order/id", hint: "The two settings above apply to each value there." },
  { at: "conversationKey", label: "Conversation key", more: true, half: true, when: ({ workflow }) => !workflow },
  { at: "mailbox.port", label: "Port", kind: "number", more: true, half: true, placeholder: "993", when: isMailbox },
  { at: "mailbox.pollSeconds", label: "Poll every (seconds)", kind: "number", more: true, half: true, placeholder: "60", when: isMailbox },
];

export function secret(text: string | undefined): string {
  return text ? `Secret (shown only once): ${text}` : "Saved.";
}

const addressOf = (triggerId: string): string => `/hooks/${encodeURIComponent(who.value?.caller?.storeId ?? "")}/${triggerId}`;

function Address({ triggerId }: { triggerId: string }): VNode {
  const [copied, setCopied] = useState(false);
  const url = location.origin + addressOf(triggerId);
  return (
    <>
      <h2>Address</h2>
      <p class="row">
        <code class="cut" tabIndex={0}>{url}</code>
        <button class="icon" aria-label="Copy the address" onClick={() => void navigator.clipboard?.writeText(url).then(() => setCopied(true))}>
          <Icon name={copied ? "check" : "copy"} />
        </button>
      </p>
      <p class="quiet">Send events there with POST. If a proxy is in front of the gateway, use its host name.</p>
    </>
  );
}

const TEST = JSON.stringify({ test: true, message: "Sent from the console" }, null, 2);

/** The signature of an event by Standard Webhooks. */
async function signature(secret: string, id: string, at: string, body: string): Promise<string> {
  const bytes = Uint8Array.from(atob(secret.replace("whsec_", "")), (each) => each.charCodeAt(0));
  const key = await crypto.subtle.importKey("raw", bytes, { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
  const signed = await crypto.subtle.sign("HMAC", key, new TextEncoder().encode(`${id}.${at}.${body}`));
  return `v1,${btoa(String.fromCharCode(...new Uint8Array(signed)))}`;
}

/** Sends an event as another program would, with the secret that only the user has. */
async function send({ triggerId = "", definition }: TriggerJson, { secret: given = "", body = "" }: Values): Promise<string> {
  const [id, at] = [requestId(), String(Math.floor(Date.now() / 1000))];
  const isSigned = definition?.webhook?.authentication !== "WEBHOOK_AUTHENTICATION_BEARER";
  const proof: Record<string, string> = isSigned ? { "webhook-signature": await signature(given, id, at, body) } : { authorization: `Bearer ${given}` };
  const answer = await fetch(addressOf(triggerId), { method: "POST", body, headers: { "content-type": "application/json", "webhook-id": id, "webhook-timestamp": at, ...proof } });
  const said = (await answer.json()) as { message?: string; fire?: ScheduleFireJson };
  if (!answer.ok) throw new Error(said.message ?? `The gateway answered ${answer.status}.`);
  return `Outcome: ${short(said.fire?.outcome, "SCHEDULE_FIRE_OUTCOME_")}. See the events below.`;
}

export const triggers: Resource<TriggerJson> = {
  path: "triggers",
  lead: "A trigger starts a run for each event: a webhook, or an e-mail in a mailbox.",
  declared: ({ definition }) => ["trigger", definition?.name ?? ""],
  empty: "No triggers. Create one here or with pawl triggers create.",
  list: async () => ({ items: (await pawl.triggers.listTriggers({})).triggers ?? [] }),
  id: ({ definition }) => definition?.name ?? "",
  get: async (name) => (await pawl.triggers.getTrigger({ name })).trigger,
  columns: [
    { name: "Name", of: ({ definition }) => definition?.name, under: ({ definition }) => (definition?.workflow ? `Workflow ${definition.workflow}` : cut(definition?.text)) },
    { name: "Message", detailed: true, of: ({ definition }) => cut(definition?.text) },
    { name: "Source", size: 190, priority: 2, of: ({ definition: each }) => (each?.mailbox ? `mailbox ${each.mailbox.username ?? ""}` : "webhook") },
    { name: "State", size: 170, of: (each) => (each.unreachableTime ? <Badge tone="bad">unreachable: {visible(each.unreachableReason ?? "")}</Badge> : paused(each)) },
    { name: "Refused", size: 110, priority: 3, of: ({ refusedCount, refusedReason }) => refusedCount && `${refusedCount}: ${cut(refusedReason)}` },
    { name: "Failures", size: 90, priority: 3, num: true, of: ({ failures }) => failures ?? 0 },
  ],
  make: {
    name: "New trigger",
    method: "agent.v1.TriggerService/CreateTrigger",
    value: () => ({ name: "", text: "{{event}}", webhook: { authentication: SIGNATURE } }),
    save: async (definition) => secret((await pawl.triggers.createTrigger({ definition: cleaned(definition) })).secret),
    fields: [{ at: "name", label: "Name", hint: "Letters, digits, - and _." }, { at: "source", label: "Source", kind: "own", view: (props) => <Source {...props} /> }, ...FIELDS],
  },
  edit: {
    name: "Edit trigger",
    method: "agent.v1.TriggerService/UpdateTrigger",
    value: ({ definition }) => definition,
    save: async (definition) => void (await pawl.triggers.updateTrigger({ definition: cleaned(definition) })),
    fields: FIELDS,
  },
  start: {
    name: "Send a test event",
    submit: "Send",
    method: "agent.v1.TriggerService/UpdateTrigger",
    when: ({ definition }) => !!definition?.webhook,
    plain: true,
    unkept: true,
    value: () => ({ secret: "", body: TEST }),
    fields: [
      { at: "secret", label: "Secret", hint: "Shown when the trigger was created. Rotate it if you no longer have it." },
      { at: "body", label: "Body", kind: "area", keeps: true },
    ],
    save: (event, trigger) => send(trigger, event),
  },
  actions: [
    {
      name: "Rotate secret",
      method: "agent.v1.TriggerService/RotateTriggerSecret",
      when: ({ definition }) => !!definition?.webhook,
      bad: true,
      run: async ({ definition }) => secret((await pawl.triggers.rotateTriggerSecret({ name: definition?.name ?? "" })).secret),
    },
    ...lifeOf<TriggerJson>("Trigger", pawl.triggers.pauseTrigger, pawl.triggers.resumeTrigger, pawl.triggers.deleteTrigger),
  ],
  below: ({ fires: all = [], triggerId = "", definition }) => (
    <>
      {definition?.webhook && <Address triggerId={triggerId} />}
      <h2>Events</h2>
      {all.length ? <Table name="Fires" columns={fires} items={all} /> : <p class="quiet">No events yet.</p>}
    </>
  ),
};
