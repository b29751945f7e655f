import type { VNode } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { Chat, listAhead } from "./chat";
import { Inbox } from "./inbox";
import { Later } from "./later";
import { Login } from "./login";
import { Boundary } from "./markdown";
import { MENU } from "./menu";
import { arrive, decoded, follow, forPeople, go, isKnown, logOut, may, notice, online, path, problems, who } from "./state";
import { visible } from "./visible";

const PAGES = [
  { path: "/", name: "Chat", key: "c" },
  { path: "/inbox", name: "Inbox", key: "i" },
  { path: "/runs", name: "Runs", key: "r" },
  { path: "/background", name: "Background", key: "b" },
] as const;

export function App(): VNode {
  const help = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (isHere("/") && isKnown()) listAhead();
    void arrive();
    let before = "";
    const keys = (event: KeyboardEvent): void => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (isTyping(event.target)) {
        if (event.key === "Escape" && !help.current?.open) (event.target as HTMLElement).blur();
        return;
      }
      const page = before === "g" && PAGES.find(({ key }) => key === event.key);
      before = event.key;
      if (page) go(page.path);
      if (event.key === "?") help.current?.showModal();
      else if (!help.current?.open) pressed(event);
      if (event.key === "/") {
        const field = document.querySelector<HTMLElement>("[data-first]");
        if (field) {
          event.preventDefault();
          field.focus();
        }
      }
    };
    document.addEventListener("keydown", keys);
    return () => document.removeEventListener("keydown", keys);
  }, []);
  const caller = who.value;
  useEffect(() => {
    const count = forPeople.value.length;
    const here = [...PAGES, ...more()].find((page) => isHere(page.path));
    document.title = `${count ? `(${count}) ` : ""}${here?.name ?? "Pawl"} · Pawl`;
  });
  if (caller === undefined) return <Waiting />;
  if (caller === null) return <Login />;
  return (
    <div class="frame" onClick={follow}>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); event.stopPropagation(); document.getElementById("main")?.focus(); }}>
        Skip to content
      </a>
      <nav aria-label="Pages">
        <span class="brand" aria-hidden="true">Pawl</span>
        {PAGES.map((page) => (
          <a key={page.path} href={page.path} aria-current={isHere(page.path) ? "page" : undefined} title={`g ${page.key}`}>
            {page.name}
            {page.path === "/inbox" && forPeople.value.length > 0 && (
              <span class="badge">
                {forPeople.value.length}
                <span class="unseen"> waiting</span>
              </span>
            )}
          </a>
        ))}
        <More />
        <span class="space" />
        <Theme />
        <span class="quiet user" title={(caller.caller?.roles ?? []).join(", ")}>
          {caller.caller?.userId} @ {caller.caller?.storeId}
        </span>
        <button class="plain" aria-label="Help and keyboard shortcuts" title="?" onClick={() => help.current?.showModal()}>
          ?
        </button>
        <button class="plain" onClick={() => void logOut()}>
          Log out
        </button>
      </nav>
      {!online.value && (
        <p class="strip" role="status">
          Connection lost. Reconnecting automatically; runs continue.
        </p>
      )}
      {problems.value.length > 0 && (
        <div class="strip bad" role="alert">
          {problems.value.map((line) => (
            <div key={line}>{visible(line)}</div>
          ))}
        </div>
      )}
      {notice.value && (
        <p class="strip bad" role="alert">
          {visible(notice.value)}{" "}
          <button class="plain" onClick={() => (notice.value = "")}>
            Close
          </button>
        </p>
      )}
      <main id="main" tabIndex={-1}>
        <Boundary key={path.value}>
          <Page />
        </Boundary>
      </main>
      <dialog ref={help} aria-labelledby="help">
        <h2 id="help">Keyboard shortcuts</h2>
        <table>
          <tbody>
            {[...PAGES.map((page) => [`g ${page.key}`, `go to ${page.name}`] as const), ...KEYS].map(([key, does]) => (
              <tr key={key}>
                <th scope="row">
                  <kbd>{key}</kbd>
                </th>
                <td>{does}</td>
              </tr>
            ))}
          </tbody>
        </table>
        <p class="quiet">Runs continue when this page is closed. Everything waiting for you is in the inbox.</p>
        <form method="dialog">
          <button>Close</button>
        </form>
      </dialog>
    </div>
  );
}

const KEYS = [
  ["j, k", "next and previous item in a list"],
  ["Enter", "open the item; in the chat, send"],
  ["a, e, r", "approve, edit or reject the focused item"],
  ["x", "select the item for a bulk decision"],
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
  return (
    <Later
      key={path.value}
      show={({ RESOURCES, RunPage, ExecutionPage, Settings, List, Detail }) => {
        if (first === "settings") return <Settings />;
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
  return (
    <section class="page">
      <h1>Page not found</h1>
      <p>
        <a href="/">Go to the chat</a>
      </p>
    </section>
  );
}

/** The pages in the menu that the user may see. */
function more(): { path: string; name: string }[] {
  const lists = Object.entries(MENU).filter(([name, { method }]) => may(method) && !PAGES.some((page) => page.path === `/${name}`));
  return [...lists.map(([name, list]) => ({ path: `/${name}`, name: list.name })), { path: "/settings", name: "Settings" }];
}

function More(): VNode {
  const pages = more();
  const here = pages.find((page) => isHere(page.path));
  const menu = useRef<HTMLDetailsElement>(null);
  useEffect(() => {
    const close = (event: Event): void => {
      if (!menu.current?.open) return;
      if (event instanceof KeyboardEvent) {
        if (event.key !== "Escape") return;
        menu.current.querySelector("summary")?.focus();
      } else if (menu.current.contains(event.target as Node)) return;
      menu.current.open = false;
    };
    for (const each of ["click", "keydown"]) document.addEventListener(each, close);
    return () => {
      for (const each of ["click", "keydown"]) document.removeEventListener(each, close);
    };
  }, []);
  return (
    <details ref={menu} class="more" onClick={(event) => (event.target as Element).closest("a") && (event.currentTarget.open = false)}>
      <summary aria-current={here ? "page" : undefined}>{here?.name ?? "More"}</summary>
      <ul>
        {pages.map(({ path: page, name }) => (
          <li key={page}>
            <a href={page} aria-current={here?.path === page ? "page" : undefined}>
              {name}
            </a>
          </li>
        ))}
      </ul>
    </details>
  );
}

function Waiting(): VNode {
  return (
    <main class="login" aria-busy="true">
      <p class="quiet" role="status">
        {online.value ? "Loading ..." : "The gateway is not responding. Retrying ..."}
      </p>
    </main>
  );
}

function Theme(): VNode {
  const flip = (): void => {
    const root = document.documentElement;
    const dark = root.dataset["theme"] ? root.dataset["theme"] === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset["theme"] = dark ? "light" : "dark";
    localStorage.setItem("theme", root.dataset["theme"]);
  };
  return (
    <button class="plain" onClick={flip} aria-label="Toggle dark mode">
      ◐
    </button>
  );
}

const chosen = localStorage.getItem("theme");
if (chosen) document.documentElement.dataset["theme"] = chosen;

function isHere(page: string): boolean {
  return page === "/" ? path.value === "/" || path.value.startsWith("/c/") : path.value.startsWith(page);
}

function isTyping(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || target.matches("textarea, select, input:not([type=checkbox])"));
}
