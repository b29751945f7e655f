import { emptyView, PawlError, requestId, type RunView } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import type { BackgroundJobJson } from "../../client/gen/pawl/agent/v1/jobs_pb";
import type { ConversationJson } from "../../client/gen/pawl/event/v1/conversation_pb";
import type { MessageJson } from "../../client/gen/pawl/event/v1/message_pb";
import type { RunJson } from "../../client/gen/pawl/event/v1/run_pb";
import { Markdown, plain } from "./markdown";
import { ago, attempt, go, may, pawl, who, word } from "./state";
import { TOOLS, runTool } from "./tools";
import { RunLog } from "./view";

/** A run of a conversation with the message that began it; what ended long ago is read from its messages. */
type Policy = "MESSAGE_POLICY_QUEUE" | "MESSAGE_POLICY_STEER";

interface Turn {
  run: RunJson;
  /** True if the run has a log to watch. */
  live: boolean;
  asked: string;
  /** What the model has said, for where the log does not tell it any more. */
  said: string[];
  notice: boolean;
  /** The number of its last message, from which the conversation can be begun again; 0 while there is none. */
  last: number;
}

export function Chat({ conversationId }: { conversationId: string }): VNode {
  const [listed, setListed] = useState<ConversationJson[]>();
  const [open, setOpen] = useState(false);
  const reload = (): void => void attempt(async () => setListed((await pawl.conversations.listConversations({ pageSize: 50 })).conversations ?? []));
  useEffect(reload, [conversationId]);
  return (
    <div class={`chat ${open ? "listing" : ""}`}>
      <aside aria-label="Conversations">
        <a class="button" href="/">
          New conversation
        </a>
        <ul>
          {listed?.map((each) => (
            <li key={each.conversationId}>
              <a href={`/c/${each.conversationId}`} aria-current={each.conversationId === conversationId ? "page" : undefined}>
                {plain(each.title || "Untitled")}
                <small class="quiet">{ago(each.updateTime)}</small>
              </a>
            </li>
          ))}
        </ul>
        {listed?.length === 0 && <p class="quiet">Your conversations stand here.</p>}
      </aside>
      <button class="plain lister" onClick={() => setOpen(!open)} aria-expanded={open}>
        Conversations
      </button>
      <Conversation conversationId={conversationId} onRun={reload} />
    </div>
  );
}

function Conversation({ conversationId, onRun }: { conversationId: string; onRun: () => void }): VNode {
  const [turns, setTurns] = useState<Turn[]>([]);
  const [views, setViews] = useState<Record<string, RunView>>({});
  const [jobs, setJobs] = useState<BackgroundJobJson[]>([]);
  const [missing, setMissing] = useState(false);
  const busy = useRef(false);
  busy.current = jobs.length > 0;
  const end = useRef<HTMLDivElement>(null);
  const watched = useRef(new Map<string, () => void>());
  const history = useRef(new History(conversationId));

  const watch = (run: RunJson): void => {
    const id = run.runId ?? "";
    if (watched.current.has(id)) return;
    setViews((all) => ({ ...all, [id]: all[id] ?? emptyView(run) }));
    watched.current.set(
      id,
      pawl.watchRun(id, (view) => {
        setViews((all) => ({ ...all, [id]: view }));
        for (const call of Object.values(view.calls)) void runTool(call);
      }),
    );
  };
  const load = (): Promise<void | undefined> =>
    attempt(async () => {
      if (!conversationId) return;
      const found = await history.current.read();
      if (found === "missing") return setMissing(true);
      if (found) {
        setTurns(found);
        for (const { run, live } of found) if (live) watch(run);
      }
      if (found || busy.current) setJobs((await pawl.jobs.listJobs({ conversationId, openOnly: true })).jobs ?? []);
    });
  useEffect(() => {
    void load();
    // Turns that nobody asked for begin by themselves, and other tabs write, too. One question says whether there is more.
    const timer = setInterval(() => conversationId && !document.hidden && void load(), 3000);
    return () => {
      clearInterval(timer);
      for (const leave of watched.current.values()) leave();
    };
  }, [conversationId]);
  const length = turns.length + Object.values(views).reduce((sum, view) => sum + view.seq, 0);
  const near = useRef(true);
  useEffect(() => {
    if (near.current) end.current?.scrollIntoView({ block: "end" });
  }, [length]);

  const active = turns.map(({ run }) => views[run.runId ?? ""] ?? emptyView(run)).find((view) => !view.ended);
  const send = async (text: string, policy: Policy): Promise<boolean> => {
    const done = await attempt(async () => {
      if (!conversationId) {
        const { run = {} } = await pawl.agent.startRun({ requestId: requestId(), text, frontEndTools: TOOLS });
        go(`/c/${run.conversationId}`);
        return true;
      }
      const steered = policy === "MESSAGE_POLICY_STEER";
      const { run = {} } = steered
        ? await pawl.agent.sendMessage({ requestId: requestId(), conversationId, text, policy })
        : await pawl.agent.startRun({ requestId: requestId(), conversationId, text, policy, frontEndTools: TOOLS });
      const turn: Turn = { run, live: true, asked: text, said: [], notice: false, last: 0 };
      setTurns((all) => (all.some((each) => each.run.runId === run.runId) ? all : [...all, turn]));
      watch(run);
      onRun();
      return true;
    });
    near.current = true;
    return done ?? false;
  };
  if (missing) return <section class="page"><h1>This conversation is not there</h1><p><a href="/">Begin another one</a></p></section>;
  return (
    <section
      class="talk"
      aria-label="Conversation"
      onScroll={(event) => {
        const pane = event.currentTarget;
        near.current = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 120;
      }}
    >
      <div class="turns">
        {turns.length > 0 && <h1 class="unseen">Conversation</h1>}
        {!turns.length && (
          <div class="empty">
            <h1>What can I do for you?</h1>
            <p class="quiet">
              Agent {who.value?.deployment?.agentNames?.[0] ?? "default"}, model {who.value?.deployment?.model}. You may close this page: the work goes on.
            </p>
          </div>
        )}
        {turns.map(({ run, live, asked, said, notice, last }) => {
          const view = views[run.runId ?? ""] ?? emptyView(run);
          return (
            <div key={run.runId} class="turn" data-run={run.runId} data-state={word(view.run.state)}>
              {asked && !notice && <div class="mine">{plain(asked)}</div>}
              {notice && <p class="quiet">↩ {plain(asked || "news from the background")}</p>}
              {live ? <RunLog view={view} said={said} /> : said.map((text, key) => <Markdown key={key} text={text} />)}
              <p class="quiet tools">
                {live && <a href={`/runs/${run.runId}`}>details</a>}
                {view.ended && last > 0 && may("agent.v1.ConversationService/ForkConversation") && (
                  <button class="plain" onClick={() => void fork(conversationId, last)}>
                    start again from here
                  </button>
                )}
              </p>
            </div>
          );
        })}
        <div ref={end} />
      </div>
      {jobs.length > 0 && (
        <p class="strip" role="status">
          In the background: {jobs.map((job) => plain(job.definition?.toolName ?? "")).join(", ")}. <a href="/background">See and stop</a>
        </p>
      )}
      <Composer active={active} onSend={send} />
    </section>
  );
}

function Composer({
  active,
  onSend,
}: {
  active: RunView | undefined;
  onSend: (text: string, policy: Policy) => Promise<boolean>;
}): VNode {
  const field = useRef<HTMLTextAreaElement>(null);
  const [busy, setBusy] = useState(false);
  const [steer, setSteer] = useState(false);
  useEffect(() => field.current?.focus(), []);
  const send = async (): Promise<void> => {
    const text = field.current?.value.trim();
    if (!text || busy || !field.current) return;
    setBusy(true);
    const sent = await onSend(text, active && steer ? "MESSAGE_POLICY_STEER" : "MESSAGE_POLICY_QUEUE");
    setBusy(false);
    if (!field.current) return; // Its conversation has a page of its own now.
    if (sent) field.current.value = "";
    field.current.focus();
  };
  if (!may("agent.v1.AgentService/StartRun")) return <p class="strip">You may read here, and not write.</p>;
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
        onKeyDown={(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            void send();
          }
        }}
      />
      <div class="buttons">
        {active && (
          <>
            <label class="row quiet">
              <input type="checkbox" checked={steer} onChange={(event) => setSteer(event.currentTarget.checked)} /> into the running work
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

/** The messages of a conversation as far as they were read. */
class History {
  readonly #id: string;
  readonly #messages = new Map<string, MessageJson>();
  /** The page that was the last, which may have grown. */
  #pageToken = "";
  #seen = "";

  constructor(conversationId: string) {
    this.#id = conversationId;
  }

  /** Returns the turns if there is more than before, and else undefined. It reads the messages that are new, and no others. */
  async read(): Promise<Turn[] | "missing" | undefined> {
    const conversationId = this.#id;
    const conversation = await pawl.conversations.getConversation({ conversationId }).catch((error: unknown) => {
      if (error instanceof PawlError && error.code === "not_found") return "missing" as const;
      throw error;
    });
    if (conversation === "missing") return conversation;
    const { updateTime, activeRunId, queuedRunCount, lastMessageNumber } = conversation.conversation ?? {};
    const seen = JSON.stringify([updateTime, activeRunId, queuedRunCount, lastMessageNumber]);
    if (seen === this.#seen) return undefined;
    const { runs = [] } = await pawl.agent.listRuns({ conversationId, order: "RUN_ORDER_NEWEST_FIRST", pageSize: 30 });
    for (let more = true; more && this.#messages.size < MESSAGES_MAX; ) {
      const page = await pawl.agent.listMessages({ conversationId, pageSize: 200, pageToken: this.#pageToken });
      for (const message of page.messages ?? []) this.#messages.set(`${message.number}`, message);
      more = !!page.nextPageToken;
      if (page.nextPageToken) this.#pageToken = page.nextPageToken;
    }
    this.#seen = seen;
    return turnsOf(runs, [...this.#messages.values()]);
  }
}

const MESSAGES_MAX = 1000;

/** Returns the runs of a conversation, oldest first, each with what began it and what was said. */
function turnsOf(runs: RunJson[], messages: MessageJson[]): Turn[] {
  const turns = new Map<string, Turn>();
  const turnOf = (run: RunJson, live: boolean): Turn => {
    const id = run.runId ?? "";
    const turn = turns.get(id) ?? { run, live, asked: "", said: [], notice: (run.generation ?? 0) > 0, last: 0 };
    turns.set(id, turn);
    return turn;
  };
  const known = new Map(runs.map((run) => [run.runId ?? "", run]));
  let loose = 0;
  for (const message of messages) {
    const { runId = "", role, text = "" } = message;
    // What was imported belongs to no run of ours: each question of it begins a turn.
    if (message.imported && role === "ROLE_USER") loose++;
    const run = known.get(runId);
    const turn = turnOf(run ?? { runId: runId || `imported-${loose}`, state: "RUN_STATE_COMPLETED" }, run !== undefined);
    turn.last = Number(message.number ?? 0);
    if (role === "ROLE_USER" || role === "ROLE_NOTICE") {
      turn.notice ||= role === "ROLE_NOTICE" && !turn.asked;
      turn.asked ||= text;
    } else if (role === "ROLE_ASSISTANT" && text) turn.said.push(text);
  }
  for (const run of [...runs].reverse()) if (!run.reportsToConversationId) turnOf(run, true);
  return [...turns.values()].filter(
    ({ run, notice, said }) => !(notice && run.state === "RUN_STATE_COMPLETED" && !said.length && !run.outputText),
  );
}

async function fork(conversationId: string, number: number): Promise<void> {
  const made = await attempt(() => pawl.conversations.forkConversation({ requestId: requestId(), conversationId, number: String(number) }));
  if (made?.conversation?.conversationId) go(`/c/${made.conversation.conversationId}`);
}
