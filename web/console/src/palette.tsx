/** The command palette: finds pages, conversations, runs, agents and actions. */

import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { aboutOf, nameOf } from "./about";
import { Icon, type IconName } from "./design/icons";
import { Dialog } from "./design/parts";
import { plain } from "./format";
import { entries } from "./menu";
import { flipTheme } from "./nav";
import { go, logOut, may, pawl, word } from "./state";
import { visible } from "./visible";

interface Hit {
  icon: IconName;
  name: string;
  kind: string;
  open: () => void;
}

const HITS_MAX = 40;
const PAUSE_MS = 150;
const link = (icon: IconName, name: string, kind: string, to: string): Hit => ({ icon, name: visible(name).slice(0, 120), kind, open: () => go(to) });

function known(): Hit[] {
  return [
    ...entries().map(({ path, name, icon }) => link(icon, name, "Page", path)),
    link("plus", "New conversation", "Action", "/"),
    { icon: "theme", name: "Toggle dark mode", kind: "Action", open: flipTheme },
    { icon: "leave", name: "Log out", kind: "Action", open: () => void logOut() },
  ];
}

async function listed<T>(method: string, load: () => Promise<T[] | undefined>): Promise<T[]> {
  return may(method) ? ((await load().catch(() => [])) ?? []) : [];
}

/** Agents, workflows and the latest runs, read once when the palette opens. */
async function read(): Promise<Hit[]> {
  const [agents, workflows, runs] = await Promise.all([
    listed("agent.v1.AgentRegistryService/ListAgents", async () => (await pawl.agents.listAgents({ pageSize: 100 })).agents),
    listed("agent.v1.WorkflowService/ListWorkflows", async () => (await pawl.workflows.listWorkflows({ pageSize: 100 })).workflows),
    listed("agent.v1.AgentService/ListRuns", async () => (await pawl.agent.listRuns({ pageSize: 100, order: "RUN_ORDER_NEWEST_FIRST" })).runs),
  ]);
  return [
    ...agents.map(({ definition: { name = "" } = {} }) => link("agents", name, "Agent", `/agents/${name}`)),
    ...workflows.map(({ name = "" }) => link("workflows", name, "Workflow", `/workflows/${name}`)),
    // The messages of runs are not read here: there are too many.
    ...runs.map((run) => link("runs", [run.workflow || run.job || run.goal ? aboutOf(run) : "", plain(run.failure?.message ?? run.outputText ?? "")].filter(Boolean).join(" · ") || `Run of ${run.agent?.name ?? "default"}`, `Run, ${word(run.state)}`, `/runs/${run.runId}`)),
  ];
}

async function conversations(query: string): Promise<Hit[]> {
  const { conversations: found = [] } = await pawl.conversations.listConversations({ pageSize: 10, query });
  return found.map(({ conversationId, title }) => link("chat", nameOf(title ?? "") || "Untitled", "Conversation", `/c/${conversationId}`));
}

export function Palette({ onClose }: { onClose: () => void }): VNode {
  const [words, setWords] = useState("");
  const [others, setOthers] = useState<Hit[]>();
  const [talks, setTalks] = useState<Hit[]>([]);
  const [at, setAt] = useState(0);
  const list = useRef<HTMLUListElement>(null);
  useEffect(() => void read().then(setOthers), []);
  useEffect(() => {
    let isStale = false;
    const timer = setTimeout(() => conversations(words.trim()).then((found) => isStale || setTalks(found), () => {}), words ? PAUSE_MS : 0);
    return () => void ((isStale = true), clearTimeout(timer));
  }, [words]);
  useEffect(() => list.current?.children[at]?.scrollIntoView({ block: "nearest" }), [at]);
  const parts = words.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = ({ name, kind }: Hit): boolean => parts.every((part) => `${name} ${kind}`.toLowerCase().includes(part));
  const id = words.trim();
  const direct = /^run_\w+$/.test(id) ? [link("runs", id, "Run", `/runs/${id}`)] : [];
  const hits = [...direct, ...known().filter(fits), ...(parts.length ? (others ?? []).filter(fits) : []), ...talks].slice(0, HITS_MAX);
  const open = (hit: Hit | undefined): void => {
    if (!hit) return;
    onClose();
    hit.open();
  };
  const moved = (event: KeyboardEvent): void => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Enter") open(hits[at]);
    else if (step && hits.length) setAt((at + step + hits.length) % hits.length);
    else return;
    event.preventDefault();
  };
  return (
    <Dialog title="Search or jump to" class="palette" onClose={onClose}>
      <input
        role="combobox" aria-label="Search" aria-expanded="true" aria-controls="hits"
        aria-activedescendant={hits.length ? `hit-${at}` : undefined}
        autocomplete="off"
        placeholder="Find a page, conversation, run or agent"
        value={words}
        onInput={(event) => (setWords(event.currentTarget.value), setAt(0))}
        onKeyDown={moved}
      />
      <ul ref={list} id="hits" role="listbox" aria-label="Results">
        {hits.map((hit, index) => (
          <li key={`${hit.kind} ${hit.name} ${index}`} id={`hit-${index}`} role="option" aria-selected={index === at} onClick={() => open(hit)}>
            <Icon name={hit.icon} />
            <span class="cut">{hit.name}</span>
            <span class="quiet">{hit.kind}</span>
          </li>
        ))}
      </ul>
      {!hits.length && <p class="empty" role="status">{others ? `No matches for ${visible(words)}.` : "Searching ..."}</p>}
    </Dialog>
  );
}
