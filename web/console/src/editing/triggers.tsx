/** Triggers: their list, the form for webhooks and mailboxes, and the address of a webhook. */

import { requestId, type ScheduleFireJson, type TriggerJson } from "@pawl/client";
import type { VNode } from "preact";

import { Copied } from "../copy";
import { Badge } from "../design/parts";
import { type FieldSpec, type Values } from "../fields";
import { cut, short } from "../format";
import type { Resource } from "../resource";
import { pawl, who } from "../state";
import { visible } from "../visible";
import { cleaned, Fires, Last, lifeOf, OVERLAPS, Pause, paused, Starts, STARTS } from "./schedules";

const SIGNATURE = "WEBHOOK_AUTHENTICATION_SIGNATURE";
const isMailbox = ({ mailbox }: Values): boolean => !!mailbox;
const isWebhook = ({ mailbox }: Values): boolean => !mailbox;

const SOURCE: FieldSpec = {
  at: "", label: "Source", kind: "choice",
  blanks: { webhook: { webhook: { authentication: SIGNATURE } }, mailbox: { mailbox: { host: "", username: "", passwordSecret: "" } } },
  options: [["webhook", "A webhook: each request to an address starts a run"], ["mailbox", "A mailbox: each new e-mail starts a run (needs the role admin)"]],
};

const FIELDS: FieldSpec[] = [
  {
    at: "webhook.authentication", label: "How the sender authenticates", kind: "select",
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

/** Secrets that this page has shown, by trigger, so that a test event needs none. */
const secrets: Record<string, string> = {};

export function secret(text: string | undefined, name = ""): string {
  secrets[name] = text ?? "";
  return text ? `Secret (shown only once): ${text}` : "Saved.";
}

const addressOf = (triggerId: string): string => `/hooks/${encodeURIComponent(who.value?.caller?.storeId ?? "")}/${triggerId}`;
const isSigned = ({ definition }: TriggerJson): boolean => definition?.webhook?.authentication !== "WEBHOOK_AUTHENTICATION_BEARER";

/** The address of a webhook, and how to send an event there. */
function Address({ of: trigger }: { of: TriggerJson }): VNode {
  const url = location.origin + addressOf(trigger.triggerId ?? "");
  const proof = isSigned(trigger) ? "-H 'webhook-signature: v1,...'" : "-H 'authorization: Bearer SECRET'";
  return (
    <>
      <h2>Address</h2>
      <Copied name="Copy the address" text={url} />
      <p class="quiet">Send each event there with POST{isSigned(trigger) ? ", signed as Standard Webhooks describe" : " and the secret in a header"}. Behind a proxy, use the name of its host.</p>
      {!isSigned(trigger) && <Copied name="Copy the command" text={`curl ${url} -H 'content-type: application/json' ${proof} -H 'webhook-id: 1' -d '{}'`} />}
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
  const proof: Record<string, string> = isSigned({ ...(definition ? { definition } : {}) }) ? { "webhook-signature": await signature(given, id, at, body) } : { authorization: `Bearer ${given}` };
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
  about: ({ definition: { text, workflow } = {} }) => (workflow ? undefined : text),
  columns: [
    { name: "Name", icon: ({ definition }) => (definition?.mailbox ? "mail" : "triggers"), of: ({ definition }) => definition?.name, under: ({ definition }) => <Starts of={definition} /> },
    { name: "Source", size: 200, priority: 2, of: ({ definition: each }) => (each?.mailbox ? `mailbox ${each.mailbox.username ?? ""}` : "webhook") },
    { name: "State", size: 150, priority: 1, of: (each) => (each.unreachableTime ? <Badge tone="bad">unreachable</Badge> : paused(each)), under: ({ unreachableReason }) => cut(unreachableReason) },
    { name: "Last event", size: 190, priority: 1, listed: true, of: ({ definition: { name = "" } = {} }) => <Last read={async () => (await pawl.triggers.getTrigger({ name })).trigger?.fires ?? []} /> },
    { name: "Starts", detailed: true, of: ({ definition }) => <Starts of={definition} /> },
    { name: "Refused", size: 280, priority: 3, of: ({ refusedCount, refusedReason }) => Number(refusedCount ?? 0) > 0 && <span class="fault">{refusedCount}: {cut(refusedReason)}</span> },
    { name: "Failures in a row", detailed: true, of: ({ failures }) => failures },
  ],
  make: {
    name: "New trigger", method: "agent.v1.TriggerService/CreateTrigger", value: () => ({ name: "", text: "{{event}}", webhook: { authentication: SIGNATURE } }),
    save: async (definition) => secret((await pawl.triggers.createTrigger({ definition: cleaned(definition) })).secret, definition.name),
    fields: [{ at: "name", label: "Name", hint: "Letters, digits, - and _." }, SOURCE, ...FIELDS],
  },
  edit: {
    name: "Edit trigger", method: "agent.v1.TriggerService/UpdateTrigger", value: ({ definition }) => definition,
    save: async (definition) => void (await pawl.triggers.updateTrigger({ definition: cleaned(definition) })),
    fields: FIELDS,
  },
  start: {
    name: "Send a test event", submit: "Send", method: "agent.v1.TriggerService/UpdateTrigger", when: ({ definition }) => !!definition?.webhook, plain: true,
    dialog: ({ definition }) => `Send a test event to ${definition?.name}`, value: ({ definition }) => ({ secret: secrets[definition?.name ?? ""] ?? "", body: TEST }),
    fields: [{ at: "secret", label: "Secret", hint: "Shown when the trigger was created. Rotate it if you no longer have it." }, { at: "body", label: "Body", kind: "area", keeps: true, hint: "It starts a real run." }],
    save: (event, trigger) => send(trigger, event),
  },
  actions: [
    {
      name: "Rotate secret", method: "agent.v1.TriggerService/RotateTriggerSecret", when: ({ definition }) => !!definition?.webhook, bad: true, more: true,
      run: async ({ definition: { name = "" } = {} }) => secret((await pawl.triggers.rotateTriggerSecret({ name })).secret, name),
    },
    ...lifeOf<TriggerJson>("Trigger", pawl.triggers.pauseTrigger, pawl.triggers.resumeTrigger, pawl.triggers.deleteTrigger),
  ],
  below: (trigger) => (
    <>
      <Pause {...trigger} />
      <h2>Events</h2>
      {trigger.fires?.length ? <Fires all={trigger.fires} /> : <p class="quiet">No events yet. Send a test event to try it.</p>}
      {trigger.definition?.webhook && <Address of={trigger} />}
    </>
  ),
};
