import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { Chat } from "./chat";
import { listAhead } from "./conversations";
import { Dialog, Empty, Toast } from "./design/parts";
import { Inbox } from "./inbox";
import { Design, Later, Search } from "./later";
import { Login } from "./login";
import { Boundary } from "./markdown";
import { entries, isHere } from "./menu";
import { Navigation } from "./nav";
import { arrive, decoded, follow, forPeople, go, isFixed, isKnown, notice, online, path, problems, who } from "./state";
import { visible } from "./visible";

type Open = "" | "help" | "palette";

function useKeys(onOpen: (open: Open) => void): void {
  useEffect(() => {
    let before = "";
    const keys = (event: KeyboardEvent): void => {
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k" && who.value) {
        event.preventDefault();
        onOpen("palette");
      }
      if (document.querySelector("dialog[open]") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (isTyping(event.target)) {
        if (event.key === "Escape") (event.target as HTMLElement).blur();
        return;
      }
      const page = before === "g" && entries().find(({ key }) => key === event.key);
      before = event.key;
      if (page) go(page.path);
      if (event.key === "?") onOpen("help");
      else pressed(event);
      const field = event.key === "/" && document.querySelector<HTMLElement>("[data-first]");
      if (field) (event.preventDefault(), field.focus());
    };
    document.addEventListener("keydown", keys);
    return () => document.removeEventListener("keydown", keys);
  }, []);
}

export function App(): VNode {
  const [open, setOpen] = useState<Open>("");
  useEffect(() => {
    if (isHere("/") && isKnown()) listAhead();
    void arrive();
  }, []);
  useKeys(setOpen);
  const caller = who.value;
  const count = forPeople.value.length;
  useEffect(() => {
    const here = entries().find((page) => isHere(page.path));
    document.title = `${count ? `(${count}) ` : ""}${here?.name ?? "Pawl"} · Pawl`;
  });
  if (caller === undefined) return <Waiting />;
  if (caller === null) return <Login />;
  return (
    <div class="frame" onClick={follow}>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); event.stopPropagation(); document.getElementById("main")?.focus(); }}>Skip to content</a>
      <Navigation onFind={() => setOpen("palette")} onHelp={() => setOpen("help")} />
      <div class="notes">
        {!online.value && <p class="strip" role="status">Connection lost. Reconnecting automatically; runs continue.</p>}
        {problems.value.length > 0 && <div class="strip bad" role="alert">{problems.value.map((line) => <div key={line}>{visible(line)}</div>)}</div>}
        {isFixed.value && <p class="strip" role="status">Fixed: the product has no errors.</p>}
      </div>
      <main id="main" tabIndex={-1}><Boundary key={path.value}><Page /></Boundary></main>
      {notice.value && <div class="toasts"><Toast tone="bad" onClose={() => (notice.value = "")}>{visible(notice.value)}</Toast></div>}
      {open === "help" && <Help onClose={() => setOpen((now) => (now === "help" ? "" : now))} />}
      {open === "palette" && <Search show={({ Palette }) => <Palette onClose={() => setOpen((now) => (now === "palette" ? "" : now))} />} />}
    </div>
  );
}

function Help({ onClose }: { onClose: () => void }): VNode {
  const pages = entries().flatMap(({ key, name }) => (key ? [[`g ${key}`, `go to ${name}`] as const] : []));
  return (
    <Dialog title="Keyboard shortcuts" onClose={onClose}>
      <table>
        <tbody>
          {[...pages, ...KEYS].map(([key, does]) => (
            <tr key={key}>
              <th scope="row"><kbd>{key}</kbd></th>
              <td>{does}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="quiet">Runs continue when this page is closed. Everything waiting for you is in the inbox.</p>
      <form method="dialog" class="buttons"><button>Close</button></form>
    </Dialog>
  );
}

const KEYS = [
  ["j, k", "next and previous item in a list"],
  ["Enter", "open the item; in the chat, send"],
  ["a, e, r", "approve, edit or reject the focused item"],
  ["x", "select the item for a bulk decision"],
  ["Ctrl K", "find a page, conversation, run or agent"],
  ["/", "focus the message or the filter"],
  ["?", "show these shortcuts"],
  ["Esc", "leave the field or close the dialog"],
] as const;

/** Moves the focus in a list, first to an item waiting for input, or presses the button with this key. */
function pressed(event: KeyboardEvent): void {
  const items = [...document.querySelectorAll<HTMLElement>("main [data-item]")];
  const here = items.findIndex((item) => item.contains(document.activeElement));
  if (event.key === "j" || event.key === "k") {
    event.preventDefault();
    const first = Math.max(0, items.findIndex((item) => item.matches(".wait")));
    const to = items[here < 0 ? first : Math.max(0, Math.min(items.length - 1, here + (event.key === "j" ? 1 : -1)))];
    to?.focus();
    to?.scrollIntoView({ block: "nearest" });
  } else {
    const button = items[here]?.querySelector<HTMLElement>(`[data-key="${CSS.escape(event.key)}"]`);
    if (!button) return;
    event.preventDefault();
    button.click();
  }
}

function Page(): VNode {
  const [, first = "", second = "", third = ""] = path.value.split("/");
  if (first === "" || first === "c") return <Chat conversationId={decoded(second)} />;
  if (first === "inbox") return <Inbox />;
  if (first === "design") return <Design show={({ Gallery }) => <Gallery />} />;
  return (
    <Later
      key={path.value}
      show={({ RESOURCES, RunPage, ExecutionPage, Settings, Operations, List, Detail }) => {
        if (first === "settings") return <Settings />;
        if (first === "operations") return <Operations />;
        if (first === "runs" && second) return <RunPage key={second} runId={decoded(second)} />;
        if (first === "workflows" && third) return <ExecutionPage key={third} runId={decoded(third)} />;
        const resource = RESOURCES.find((each) => each.path === first);
        if (!resource) return <Nowhere />;
        return second ? <Detail key={path.value} of={resource} id={decoded(second)} /> : <List key={first} of={resource} />;
      }}
    />
  );
}

function Nowhere(): VNode {
  return <Empty icon="search" title="Page not found" level={1}><p><a href="/">Go to the chat</a></p></Empty>;
}

function Waiting(): VNode {
  return <main class="login" aria-busy="true"><p class="quiet" role="status">{online.value ? "Loading ..." : "The gateway is not responding. Retrying ..."}</p></main>;
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || target.matches("textarea, select, input:not([type=checkbox])"));
}
