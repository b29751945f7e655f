import { signal } from "@preact/signals";
import { type ConversationJson, type ConversationView, emptyConversation, isEnded, type MessageJson, pendingCalls, requestId, type RunView, type Sent, type Turn, turnsOf } from "@pawl/client";
import { Component, type ComponentChildren, type VNode } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import { type Action, Actions } from "./actions";
import { CallCard, JobStrip } from "./cards";
import { Later } from "./later";
import { Boundary, Markdown } from "./markdown";
import { ago, attempt, draft, go, isAbsent, jobs, keep, kept, may, pawl, query, who, word } from "./state";
import { TOOLS, runTool } from "./tools";
import { RunLog } from "./view";
import { visible } from "./visible";

type Policy = "MESSAGE_POLICY_QUEUE" | "MESSAGE_POLICY_STEER";

/** The listed conversations. They stay listed while another conversation opens. */
const listed = signal<ConversationJson[] | undefined>(undefined);
const hasMore = signal(false);
const PAGE = 50;
let reads = 0;
let ahead: Promise<void> | undefined;

async function list(words = "", archived = false, most = PAGE): Promise<void> {
  const read = ++reads;
  const found: ConversationJson[] = [];
  let pageToken = "";
  do {
    const page = await pawl.conversations.listConversations({ pageSize: PAGE, pageToken, query: words, archived });
    found.push(...(page.conversations ?? []));
    pageToken = page.nextPageToken ?? "";
  } while (pageToken && found.length < most);
  if (read !== reads) return;
  listed.value = found;
  hasMore.value = !!pageToken;
}

/** Loads conversations before the user is known, which saves a round trip at the start. */
export function listAhead(): void {
  ahead = list().catch(() => (ahead = undefined));
}

export function Chat({ conversationId }: { conversationId: string }): VNode {
  const [open, setOpen] = useState(false);
  const [words, setWords] = useState("");
  const [archived, setArchived] = useState(false);
  const [most, setMost] = useState(PAGE);
  const reload = (): void => void attempt(() => list(words.trim(), archived, most), true);
  useEffect(() => {
    if (ahead) return void (ahead = undefined);
    const timer = setTimeout(reload, words ? 200 : 0);
    return () => clearTimeout(timer);
  }, [conversationId, words, archived, most]);
  const run = query.value.get("run");
  return (
    <div class={`chat ${open ? "listing" : ""} ${run ? "beside" : ""}`}>
      <aside aria-label="Conversations">
        <a class="button" href="/">
          New conversation
        </a>
        <input type="search" aria-label="Search conversations" placeholder="Search" value={words} onInput={(event) => setWords(event.currentTarget.value)} />
        <ul onClick={() => setOpen(false)}>
          {listed.value?.map((each) => (
            <li key={each.conversationId}>
              <a href={`/c/${each.conversationId}`} aria-current={each.conversationId === conversationId ? "page" : undefined}>
                {visible(each.title || "Untitled")}
                <small class="quiet">
                  <Ago time={each.updateTime} />
                </small>
              </a>
            </li>
          ))}
        </ul>
        {hasMore.value && (
          <button class="plain" onClick={() => setMost(most + PAGE)}>
            More
          </button>
        )}
        {listed.value?.length === 0 && <p class="quiet">{words ? "No matches." : archived ? "No archived conversations." : "No conversations yet."}</p>}
        <label class="row quiet">
          <input type="checkbox" checked={archived} onChange={(event) => setArchived(event.currentTarget.checked)} /> Show archived
        </label>
      </aside>
      <button class="plain lister" onClick={() => setOpen(!open)} aria-expanded={open}>
        Conversations
      </button>
      <Conversation key={conversationId} conversationId={conversationId} onRun={reload} />
      {run && (
        <aside class="detail" aria-label="Run">
          <a href={`/c/${conversationId}`}>Close</a>
          <Boundary key={run}>
            <Later show={({ RunPage }) => <RunPage runId={run} beside />} />
          </Boundary>
        </aside>
      )}
    </div>
  );
}

const UPDATE = "agent.v1.ConversationService/UpdateConversation";
const ACTIONS: Action<ConversationJson>[] = [
  {
    name: "Rename",
    method: UPDATE,
    ask: "Title",
    run: ({ conversationId = "" }, title) => pawl.conversations.updateConversation({ requestId: requestId(), conversationId, title }),
  },
  ...[true, false].map((archived) => ({
    name: archived ? "Archive" : "Unarchive",
    method: UPDATE,
    when: (each: ConversationJson) => !!each.archived !== archived,
    run: ({ conversationId = "" }: ConversationJson) => pawl.conversations.updateConversation({ requestId: requestId(), conversationId, archived }),
  })),
];

function Conversation({ conversationId, onRun }: { conversationId: string; onRun: () => void }): VNode {
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
  const showEarlier = (): Promise<void | undefined> =>
    attempt(async () => {
      const found: MessageJson[] = [];
      let pageToken = "";
      do {
        const page = await pawl.agent.listMessages({ conversationId, pageSize: 200, pageToken });
        found.push(...(page.messages ?? []).filter(({ number }) => Number(number) < view.firstNumber));
        pageToken = Number(page.messages?.at(-1)?.number ?? 0) < view.firstNumber - 1 ? (page.nextPageToken ?? "") : "";
      } while (pageToken);
      setEarlier(found);
    });
  const turns = turnsOf({ ...view, messages: [...earlier, ...view.messages] }, sent);
  const open = Object.values(view.jobs).filter((job) => !job.endTime);
  // Calls of runs below and of jobs. A run's own calls are in its log.
  const elsewhere = pendingCalls(view).filter(({ runId = "", state }) => !turns.some(({ run }) => run.runId === runId) && state !== "CALL_STATE_OFFERED");
  const length = view.messages.length + elsewhere.length + Object.values(view.logs).reduce((sum, { seq }) => sum + seq, sent.length);
  const near = useRef(true);
  const top = useRef(0);
  // In the frame of the new text, so that it costs one frame.
  useLayoutEffect(() => {
    if (near.current) talk.current?.scrollTo({ top: talk.current.scrollHeight });
  }, [length, open.length]);

  const active = turns.find(({ run }) => !isEnded(run))?.log;
  const agents = who.value?.deployment?.agentNames ?? [];
  const model = who.value?.deployment?.model;
  // A message arrives before its run, which has a create time.
  const before = turns.findLast(({ run }) => run.createTime)?.run.agent?.name ?? "";
  const agent = chosen ?? (agents.includes(before) ? before : DEFAULT);
  const send = async (text: string, policy: Policy): Promise<boolean> => {
    const done = await attempt(async () => {
      if (!conversationId) {
        const { run = {} } = await pawl.agent.startRun({ requestId: requestId(), text, agent, frontEndTools: TOOLS });
        go(`/c/${run.conversationId}`);
        return true;
      }
      const steered = policy === "MESSAGE_POLICY_STEER";
      const { run = {} } = steered
        ? await pawl.agent.sendMessage({ requestId: requestId(), conversationId, text, policy })
        : await pawl.agent.startRun({ requestId: requestId(), conversationId, text, policy, agent, frontEndTools: TOOLS });
      if (!steered) setSent((all) => [...all, { run, text }]);
      setPending(steered ? text : undefined);
      onRun();
      return true;
    });
    near.current = true;
    return done ?? false;
  };
  const mayFork = may("agent.v1.ConversationService/ForkConversation");
  if (missing) return <section class="page"><h1>Conversation not found</h1><p><a href="/">Start a new one</a></p></section>;
  return (
    <section
      ref={talk}
      class="talk"
      aria-label="Conversation"
      onScroll={(event) => {
        const { scrollHeight, scrollTop, clientHeight } = event.currentTarget;
        // New content keeps the view at the end, unless the user scrolls up.
        near.current = scrollHeight - scrollTop - clientHeight < 120 || (near.current && scrollTop >= top.current);
        top.current = scrollTop;
      }}
    >
      <div class="turns">
        {turns.length > 0 && (
          <header>
            <h1>{visible(conversation.title || "Conversation")}</h1>
            {conversation.updateTime && <Actions all={ACTIONS} item={conversation} onDone={onRun} />}
          </header>
        )}
        {!turns.length && (
          <div class="empty">
            <h1>What can I do for you?</h1>
            <p class="quiet">
              Agent {agent}{agent === DEFAULT && `, model ${model}`}. You can close this page; runs continue.
            </p>
            {model === SCRIPTED && (
              <p class="buttons">
                <span class="quiet">This is a scripted demo model. Try</span>
                {EXAMPLES.map((text) => (
                  <button key={text} class="second" onClick={() => (draft.value = text)}>
                    {text}
                  </button>
                ))}
              </p>
            )}
          </div>
        )}
        {view.firstNumber > 1 && !earlier.length && (
          <button class="second" onClick={() => void showEarlier()}>
            Show earlier messages
          </button>
        )}
        {turns.map((turn, index) => (
          <TurnView
            key={turn.run.runId}
            {...turn}
            conversationId={conversationId}
            before={turns[index - 1]?.last ?? 0}
            pending={turn.log === active && !turn.log.notes.some(({ text }) => text === pending) ? pending : undefined}
            mayFork={mayFork}
          />
        ))}
        {elsewhere.map((call) => (
          <CallCard key={call.callId} call={call} where />
        ))}
      </div>
      <div class="foot">
        <JobStrip open={open} />
        <Composer conversationId={conversationId} active={active} onSend={send}>
          {agents.some((name) => name !== DEFAULT) && (
            <label class="row quiet">
              Agent
              <select value={agent} onChange={(event) => setChosen(event.currentTarget.value)}>
                {[...new Set([DEFAULT, ...agents])].map((name) => (
                  <option key={name}>{name}</option>
                ))}
              </select>
            </label>
          )}
        </Composer>
      </div>
    </section>
  );
}

type TurnProps = Turn & { conversationId: string; before: number; pending: string | undefined; mayFork: boolean };

/** A message and what followed. Only turns that have changed are drawn again. */
class TurnView extends Component<TurnProps> {
  override shouldComponentUpdate(next: TurnProps): boolean {
    const isSame = (one: unknown, other: unknown): boolean =>
      Array.isArray(one) && Array.isArray(other) ? one.length === other.length && one.every((each, index) => each === other[index]) : one === other;
    return !Object.entries(next).every(([name, value]) => isSame(value, this.props[name as keyof TurnProps]));
  }

  override render({ run, log, known, asked, answers, notice, last, conversationId, before, pending, mayFork }: TurnProps): VNode {
    return (
      <div class="turn" data-run={run.runId} data-state={word(run.state)}>
        {asked && !notice && <div class="mine">{visible(asked)}</div>}
        {notice && <p class="quiet">↩ {visible(asked.replace(/ \(run_\w+\)$/gm, "") || "background update")}</p>}
        {known ? <RunLog view={log} answers={answers} /> : answers.map((text, key) => <Markdown key={key} text={text} />)}
        {pending && <div class="mine">{visible(pending)} <small class="quiet">(sending)</small></div>}
        <p class="quiet tools">
          {known && <a href={`/c/${conversationId}?run=${run.runId}`}>Details</a>}
          {isEnded(run) && asked && !notice && mayFork && (
            <button class="plain" onClick={() => void fork(conversationId, before, asked)}>
              Edit and resend
            </button>
          )}
          {isEnded(run) && last > 0 && mayFork && (
            <button class="plain" onClick={() => void fork(conversationId, last)}>
              Fork from here
            </button>
          )}
        </p>
      </div>
    );
  }
}

/** A time such as "2 min ago", which alone is drawn again each second. */
function Ago({ time }: { time: string | undefined }): VNode {
  return <>{ago(time)}</>;
}

const LONG = 8000;
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
    const wait = length > LONG ? drawn + Math.min(PACE_MAX_MS, length / 200) - performance.now() : 0;
    if (wait <= 0) {
      clearTimeout(timer);
      flush();
    } else timer ??= setTimeout(flush, wait);
  };
}

/** The agent used by default. */
const DEFAULT = "default";
/** The model of a suite without a model server, and examples that it understands. */
const SCRIPTED = "pawl-scripted";
const EXAMPLES = ["what is 17 * 23", "email bob@example.com about lunch", "ask me whether to continue"];

function Composer({
  conversationId,
  active,
  onSend,
  children,
}: {
  conversationId: string;
  active: RunView | undefined;
  children: ComponentChildren;
  onSend: (text: string, policy: Policy) => Promise<boolean>;
}): VNode {
  const field = useRef<HTMLTextAreaElement>(null);
  const [busy, setBusy] = useState(false);
  const [steer, setSteer] = useState(false);
  useEffect(() => {
    if (!field.current) return;
    if (draft.value) keep(conversationId, draft.value);
    draft.value = "";
    field.current.value = kept(conversationId);
    field.current.focus();
  }, [draft.value]);
  const send = async (): Promise<void> => {
    const text = field.current?.value.trim();
    if (!text || busy || !field.current) return;
    setBusy(true);
    const sent = await onSend(text, active && steer ? "MESSAGE_POLICY_STEER" : "MESSAGE_POLICY_QUEUE");
    setBusy(false);
    if (sent) keep(conversationId, "");
    if (!field.current) return; // The new conversation has opened its own page.
    if (sent) field.current.value = "";
    field.current.focus();
  };
  if (!may("agent.v1.AgentService/StartRun")) return <p class="strip">You have read-only access.</p>;
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        void send();
      }}
    >
      <textarea
        ref={field}
        data-first
        rows={2}
        aria-label="Your message"
        placeholder="Write a message"
        onInput={(event) => keep(conversationId, event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            void send();
          }
        }}
      />
      <div class="buttons">
        {children}
        {active && (
          <>
            <label class="row quiet">
              <input type="checkbox" checked={steer} onChange={(event) => setSteer(event.currentTarget.checked)} /> Steer the current run
            </label>
            <button
              type="button"
              class="second bad"
              onClick={() => void attempt(() => pawl.agent.cancelRun({ requestId: requestId(), runId: active.run.runId ?? "" }))}
            >
              Stop
            </button>
          </>
        )}
        <button disabled={busy}>Send</button>
      </div>
    </form>
  );
}

/** Opens a copy of a conversation up to a message, with a draft; without a message number, a new conversation. */
async function fork(conversationId: string, number: number, text = ""): Promise<void> {
  const request = { requestId: requestId(), conversationId, number: String(number) };
  const made = number ? await attempt(() => pawl.conversations.forkConversation(request)) : {};
  if (!made) return;
  draft.value = text;
  go(made.conversation?.conversationId ? `/c/${made.conversation.conversationId}` : "/");
}
