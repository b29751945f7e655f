import { type ConversationView, emptyConversation, isEnded, type MessageJson, type PartJson, type RunJson } from "@pawl/client";
import { pendingCalls, requestId, type Sent, turnsOf } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import { nameOf } from "./about";
import { Actions } from "./actions";
import { CallCard, JobStrip } from "./cards";
import { Composer, type Policy } from "./composer";
import { ACTIONS, Conversations, listed, newer, older, reload, resend } from "./conversations";
import { Icon, type IconName } from "./design/icons";
import { Later } from "./later";
import { Boundary, loadRich } from "./markdown";
import { attempt, draft, go, isAbsent, jobs, may, pawl, query, who } from "./state";
import { TOOLS, runTool } from "./tools";
import { TurnView } from "./turn";
import { visible } from "./visible";

export function Chat({ conversationId }: { conversationId: string }): VNode {
  const [open, setOpen] = useState(false);
  const run = query.value.get("run");
  useEffect(loadRich, []);
  return (
    <div class={`chat ${open ? "listing" : ""} ${run ? "beside" : ""}`}>
      <Conversations conversationId={conversationId} onChoose={() => setOpen(false)} />
      <button class="plain lister" onClick={() => setOpen(!open)} aria-expanded={open}>
        <Icon name="history" />
        <span>Conversations</span>
      </button>
      <Conversation key={conversationId} conversationId={conversationId} />
      {run && (
        <aside class="detail" aria-label="Run">
          <a class="button second close" href={`/c/${conversationId}`} aria-label="Close" title="Close"><Icon name="close" /></a>
          <Boundary key={run}><Later show={({ RunPage }) => <RunPage runId={run} beside />} /></Boundary>
        </aside>
      )}
    </div>
  );
}

/** How a conversation starts its runs if it is part of another page. */
export interface Embedding {
  agent: string;
  start: (run: (agent: string) => Promise<RunJson>) => Promise<RunJson>; // Starts a run with `request` and the name of an agent.
  onOpen: (conversationId: string) => void;
}

/** The turns of a conversation with the composer, on its own page or in another one. */
export function Conversation({ conversationId, within }: { conversationId: string; within?: Embedding }): VNode {
  const [view, setView] = useState(() => emptyConversation(conversationId));
  const [missing, setMissing] = useState(false);
  const [chosen, setChosen] = useState(query.value.get("agent") ?? undefined);
  const [sent, setSent] = useState<Sent[]>([]);
  const [pending, setPending] = useState<string>();
  const talk = useRef<HTMLElement>(null);
  useEffect(() => {
    if (!conversationId) return;
    return pawl.follow(
      conversationId,
      paced((now) => {
        setView(now);
        for (const call of [...Object.values(now.logs).flatMap(({ calls }) => Object.values(calls)), ...pendingCalls(now)]) void runTool(call);
      }),
      (error) => (isAbsent(error) ? setMissing(true) : void attempt(() => Promise.reject(error))),
    );
  }, [conversationId]);
  useEffect(() => {
    jobs.value = Object.fromEntries(Object.values(view.jobs).map((job) => [job.parentCallId || (job.jobId ?? ""), job]));
  }, [view.jobs]);
  const { conversation } = view;
  useEffect(() => {
    listed.value = listed.value?.map((each) => (each.conversationId === conversation.conversationId && conversation.updateTime ? conversation : each));
  }, [conversation]);
  const [earlier, setEarlier] = useState<MessageJson[]>([]);
  const turns = turnsOf({ ...view, messages: [...earlier, ...view.messages] }, sent);
  const open = Object.values(view.jobs).filter((job) => !job.endTime);
  // Calls of runs below and of jobs. A run's own calls are in its log.
  const elsewhere = pendingCalls(view).filter(({ runId = "", state }) => !turns.some(({ run }) => run.runId === runId) && state !== "CALL_STATE_OFFERED");
  const length = view.messages.length + elsewhere.length + Object.values(view.logs).reduce((sum, { seq }) => sum + seq, sent.length);
  const near = useRef(true);
  const top = useRef(0);
  const [isFar, setFar] = useState(false);
  const toEnd = (): void => talk.current?.scrollTo({ top: talk.current.scrollHeight });
  // In the frame of the new text, so that it costs one frame.
  useLayoutEffect(() => {
    if (near.current) toEnd();
  }, [length, open.length]);

  const active = turns.find(({ run }) => !isEnded(run))?.log;
  const agents = who.value?.deployment?.agentNames ?? [];
  // A message arrives before its run, which has a create time.
  const before = turns.findLast(({ run }) => run.createTime)?.run.agent?.name ?? "";
  const agent = within?.agent ?? chosen ?? (agents.includes(before) ? before : DEFAULT);
  const start = async (to: string, text: string, parts: PartJson[], policy: Policy = "MESSAGE_POLICY_QUEUE") => {
    const request = { requestId: requestId(), text, frontEndTools: within ? [] : TOOLS, ...(parts.length ? { parts } : {}), ...(to ? { conversationId: to, policy } : {}) };
    const run = async (by: string): Promise<RunJson> => (await pawl.agent.startRun({ ...request, agent: by })).run ?? {};
    return within ? within.start(run) : run(agent);
  };
  const onOpen = within?.onOpen ?? ((id: string): void => go(`/c/${id}`));
  const send = async (text: string, policy: Policy, parts: PartJson[]): Promise<boolean> => {
    near.current = true;
    const done = await attempt(async () => {
      if (!conversationId) {
        onOpen((await start("", text, parts)).conversationId ?? "");
        return true;
      }
      const steered = policy === "MESSAGE_POLICY_STEER";
      if (steered) await pawl.agent.sendMessage({ requestId: requestId(), conversationId, text, policy });
      else {
        const run = await start(conversationId, text, parts, policy);
        setSent((all) => [...all, { run, text, parts }]);
      }
      setPending(steered ? text : undefined);
      reload();
      return true;
    });
    return done ?? false;
  };
  const onResend = (number: number, text: string, parts: PartJson[]): Promise<boolean> =>
    resend(conversation, number, async (to) => (await start(to, text, parts.filter((part) => part.text === undefined))).conversationId ?? "");
  const isFresh = !turns.length && !within && (!conversationId || view.caughtUp);
  const mayFork = !within && may("agent.v1.ConversationService/ForkConversation");
  if (missing) return <section class="page"><h1>Conversation not found</h1><p><a href="/">Start a new one</a></p></section>;
  return (
    <section
      ref={talk}
      class={`talk ${isFresh ? "fresh" : ""}`}
      aria-label="Conversation"
      onScroll={(event) => {
        const { scrollHeight, scrollTop, clientHeight } = event.currentTarget;
        const rest = scrollHeight - scrollTop - clientHeight;
        // New content keeps the view at the end, unless the user scrolls up.
        near.current = rest < 120 || (near.current && scrollTop >= top.current);
        top.current = scrollTop;
        setFar(rest > 400);
      }}
    >
      {turns.length > 0 && !within && (
        <header class="talk-bar">
          <h1>{nameOf(conversation.title || "Conversation")}</h1>
          {agent !== DEFAULT && <span class="badge">{visible(agent)}</span>}
          {older(conversation) && <a href={`/c/${older(conversation)}`}>Earlier version</a>}
          {newer(conversation) && <a href={`/c/${newer(conversation)}`}>Newer version</a>}
          {conversation.updateTime && <Actions all={ACTIONS} item={conversation} menu="Conversation actions" onDone={reload} gone={() => (go("/"), reload())} />}
        </header>
      )}
      <div class="turns">
        {isFresh && <Welcome />}
        {view.firstNumber > 1 && !earlier.length && (
          <button class="second" onClick={() => void attempt(async () => setEarlier(await messagesBefore(conversationId, view.firstNumber)))}>Show earlier messages</button>
        )}
        {turns.map((turn, index) => (
          <TurnView
            key={turn.run.runId}
            {...turn}
            conversation={conversation}
            before={turns[index - 1]?.last ?? 0}
            pending={turn.log === active && !turn.log.notes.some(({ text }) => text === pending) ? pending : undefined}
            mayFork={mayFork}
            onResend={onResend}
          />
        ))}
        {elsewhere.map((call) => <CallCard key={call.callId} call={call} where />)}
      </div>
      <div class="foot">
        {isFar && <button class="second jump" onClick={() => ((near.current = true), toEnd())}><Icon name="down" /> Latest</button>}
        <JobStrip open={open} />
        <Composer takesFocus={!within} conversationId={within ? `within ${conversationId}` : conversationId} agent={agent === DEFAULT ? "the agent" : agent} active={active} onSend={send}>
          {!within && agents.some((name) => name !== DEFAULT) && (
            <select aria-label="Agent" value={agent} onChange={(event) => setChosen(event.currentTarget.value)}>
              {[...new Set([DEFAULT, ...agents])].map((name) => <option key={name}>{name}</option>)}
            </select>
          )}
        </Composer>
      </div>
      {isFresh && <Tries />}
    </section>
  );
}

const DEFAULT = "default";
/** The model of a suite without a model server, which understands only some sentences. */
const SCRIPTED = "pawl-scripted";
const TRIES: [IconName, string, string, string][] = [
  ["chat", "Ask something", "What can you help me with?", "what is 17 * 23"],
  ["mail", "Approve an action", "Send bob@example.com an e-mail about lunch tomorrow", "email bob@example.com about lunch"],
  ["background", "Work in the background", "In the background, check the time every 10 seconds, 5 times", "in the background, every 5 seconds, 3 times: what is 6 * 7"],
];

const isScripted = (): boolean => who.value?.deployment?.model === SCRIPTED;

function Welcome(): VNode {
  return (
    <div class="welcome">
      <h1>What can I do for you?</h1>
      <p class="quiet">{isScripted() ? "This demo model understands only sentences like those below." : "You can close this page at any time. Runs continue."}</p>
    </div>
  );
}

function Tries(): VNode {
  return (
    <div class="tries">
      {TRIES.map(([icon, title, text, scripted]) => (
        <button key={title} class="second" onClick={() => (draft.value = isScripted() ? scripted : text)}>
          <Icon name={icon} />
          <strong>{title}</strong>
          <span>{isScripted() ? scripted : text}</span>
        </button>
      ))}
    </div>
  );
}

async function messagesBefore(conversationId: string, firstNumber: number): Promise<MessageJson[]> {
  const found: MessageJson[] = [];
  let pageToken = "";
  do {
    const page = await pawl.agent.listMessages({ conversationId, pageSize: 200, pageToken });
    found.push(...(page.messages ?? []).filter(({ number }) => Number(number) < firstNumber));
    pageToken = Number(page.messages?.at(-1)?.number ?? 0) < firstNumber - 1 ? (page.nextPageToken ?? "") : "";
  } while (pageToken);
  return found;
}

const LONG = 4000;
const PACE_MAX_MS = 400;

/** Passes each view on; while a long text grows, less often: its last view, up to 0.4 s later. */
function paced(draw: (view: ConversationView) => void): (view: ConversationView) => void {
  let latest: ConversationView;
  let drawn = 0;
  let timer: ReturnType<typeof setTimeout> | undefined;
  const flush = (): void => {
    timer = undefined;
    drawn = performance.now();
    draw(latest);
  };
  return (view) => {
    latest = view;
    const open = Object.values(view.logs).filter(({ ended }) => !ended);
    const length = open.reduce((sum, { rounds }) => Math.max(sum, rounds.at(-1)?.text.length ?? 0), 0);
    const wait = length > LONG ? drawn + Math.min(PACE_MAX_MS, length / 100) - performance.now() : 0;
    if (wait <= 0) {
      clearTimeout(timer);
      flush();
    } else timer ??= setTimeout(flush, wait);
  };
}
