/** Navigation: a sidebar on wide screens, a bottom bar with a menu on phones. */

import type { VNode } from "preact";
import { useEffect, useState } from "preact/hooks";

import { Icon, type IconName } from "./design/icons";
import { Dialog } from "./design/parts";
import { type Entry, entries, groups, isHere } from "./menu";
import { countNeeds, forPeople, logOut, needs, path, unread, who } from "./state";

const BAR_ENTRIES = 4;
const COUNT_MAX = 99;

export function Navigation({ onFind, onHelp }: { onFind: () => void; onHelp: () => void }): VNode {
  const [isOpen, setOpen] = useState(false);
  useEffect(() => setOpen(false), [path.value]);
  useEffect(() => void countNeeds(), [path.value, unread.value]);
  const bar = entries().slice(0, BAR_ENTRIES);
  return (
    <>
      <nav class="sidebar" aria-label="Pages">
        <a class="brand" href="/" aria-label="Pawl"><img src="/icon.svg" alt="" width={20} height={20} /> Pawl</a>
        <button class="find" aria-keyshortcuts="Control+K Meta+K" onClick={onFind}><Icon name="search" /> Search <kbd>Ctrl K</kbd></button>
        <Groups />
        <User onHelp={onHelp} />
      </nav>
      <nav class="bottom" aria-label="Pages">
        {bar.map((entry) => <Link key={entry.path} entry={entry} />)}
        <button aria-expanded={isOpen} aria-current={bar.some((entry) => isHere(entry.path)) ? undefined : "page"} onClick={() => setOpen(!isOpen)}>
          <Icon name="menu" /> Menu <Count of={needs.value} what="needing you" />
        </button>
      </nav>
      {isOpen && (
        <Dialog title="Menu" onClose={() => setOpen(false)}>
          <div class="sheet">
            <Groups />
            <User onHelp={onHelp} />
          </div>
        </Dialog>
      )}
    </>
  );
}

function Groups(): VNode {
  return (
    <>
      {groups().map(([name, all]) => (
        <div key={name} class="group" role="group" aria-label={name || "Work"}>
          {name && <span class="quiet">{name}</span>}
          {all.map((entry) => <Link key={entry.path} entry={entry} />)}
        </div>
      ))}
    </>
  );
}

function Link({ entry: { path: to, name, icon, key } }: { entry: Entry }): VNode {
  const [count, what] = { "/inbox": [forPeople.value.length, "waiting"] as const, "/attention": [needs.value, "needing you"] as const, "/notifications": [unread.value, "unread"] as const }[to] ?? [0, ""];
  return (
    <a href={to} aria-current={isHere(to) ? "page" : undefined} title={key && `g ${key}`}>
      <Icon name={icon} />
      {name}
      <Count of={count} what={what} />
    </a>
  );
}

function Count({ of, what }: { of: number; what: string }): VNode | null {
  if (!of) return null;
  return <span class={`count ${what === "needing you" ? "bad" : what}`}>{of > COUNT_MAX ? `${COUNT_MAX}+` : of}<span class="unseen"> {what}</span></span>;
}

function User({ onHelp }: { onHelp: () => void }): VNode {
  const { userId = "", storeId = "", roles = [] } = who.value?.caller ?? {};
  const button = (icon: IconName, name: string, title: string, act: () => void): VNode => (
    <button class="icon" aria-label={name} title={title} onClick={act}><Icon name={icon} /></button>
  );
  return (
    <div class="user">
      <span class="person" title={roles.join(", ")}>
        <span class="face" aria-hidden="true">{userId.slice(0, 2).toUpperCase()}</span>
        <span class="cut">{userId} <span class="quiet">{storeId}</span></span>
      </span>
      {button("theme", "Toggle dark mode", "Theme", flipTheme)}
      {button("help", "Help and keyboard shortcuts", "Keyboard shortcuts (?)", onHelp)}
      {button("leave", "Log out", "Log out", () => void logOut())}
    </div>
  );
}

export function flipTheme(): void {
  const root = document.documentElement;
  const dark = root.dataset["theme"] ? root.dataset["theme"] === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset["theme"] = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset["theme"]);
}

const chosen = localStorage.getItem("theme");
if (chosen) document.documentElement.dataset["theme"] = chosen;
