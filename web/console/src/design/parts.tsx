/** Parts that all pages share. */

import { type ComponentChildren, Fragment, type VNode } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";

import { Icon, type IconName } from "./icons";

export type Tone = "ok" | "warn" | "bad" | "info" | "accent" | "grey";

export function Badge({ tone = "grey", children }: { tone?: Tone; children: ComponentChildren }): VNode {
  return <span class={`badge ${tone}`}>{children}</span>;
}

const TONES: [RegExp, Tone][] = [
  [/_(COMPLETED|SUCCEEDED|DELIVERED)$/, "ok"],
  [/_(FAILED|EXPIRED|NEEDS_ATTENTION|OUTCOME_UNKNOWN)$/, "bad"],
  // Amber means that a person must act.
  [/_(AWAITING_APPROVAL|ASKED)$|NODE_STATE_WAITING$/, "warn"],
  [/_RUNNING$/, "info"],
];

/** The tone of a state of the contract, such as RUN_STATE_FAILED. */
export function toneOf(state = ""): Tone {
  return TONES.find(([pattern]) => pattern.test(state))?.[1] ?? "grey";
}

/** The top of a page: breadcrumbs, title with badges, and actions on the right. */
export function Head({ title, crumbs, badges, children }: { title: ComponentChildren; crumbs?: [string, string][]; badges?: ComponentChildren; children?: ComponentChildren }): VNode {
  return (
    <>
      {crumbs && <p class="crumbs">{crumbs.map(([to, name]) => <Fragment key={to}><Icon name="chevron" /><a href={to}>{name}</a></Fragment>)}</p>}
      <header class="head">
        <h1>{title}</h1>
        {badges}
        {children && <div class="buttons">{children}</div>}
      </header>
    </>
  );
}

/** A name and a value in a list of facts; nothing without a value. */
export function Fact({ name, value }: { name: string; value: unknown }): VNode | null {
  return value ? <div><dt>{name}</dt><dd>{value as VNode}</dd></div> : null;
}

/** A page or a list without content: what belongs here, and what to do. */
export function Empty({ icon, title, children, level = 2 }: { icon?: IconName; title?: string; children?: ComponentChildren; level?: 1 | 2 }): VNode {
  const Heading = `h${level}` as const;
  return (
    <div class="empty">
      {icon && <Icon name={icon} />}
      {title && <Heading>{title}</Heading>}
      {children}
    </div>
  );
}

/** What cannot be shown, and where to go instead. */
export function Missing({ icon, title, fault, to, name }: { icon: IconName; title: string; fault: string; to: string; name: string }): VNode {
  return <Empty icon={icon} title={title} level={1}><p class="fault">{fault}</p><p><a href={to}>Go to {name}</a></p></Empty>;
}

/** Placeholder lines while a page loads. */
export function Skeleton({ lines = 6 }: { lines?: number }): VNode {
  return (
    <div class="skeleton" role="status" aria-busy="true">
      <span class="unseen">Loading ...</span>
      {Array.from({ length: lines }, (_, key) => <i key={key} />)}
    </div>
  );
}

/** A modal dialog, open while it is rendered. */
export function Dialog({ title, class: name = "", onClose, children }: { title: string; class?: string; onClose: () => void; children: ComponentChildren }): VNode {
  const place = useRef<HTMLDialogElement>(null);
  const id = useId();
  useEffect(() => {
    const before = document.activeElement as HTMLElement | null;
    place.current?.showModal();
    return () => before?.focus();
  }, []);
  return (
    <dialog ref={place} class={name} aria-labelledby={id} onClose={onClose} onClick={(event) => event.target === place.current && place.current?.close()}>
      <h2 id={id}>{title}</h2>
      {children}
    </dialog>
  );
}

/** Rare actions, behind a button with three dots. It closes after each action. */
export function Menu({ name, children }: { name: string; children: ComponentChildren }): VNode {
  const close = ({ currentTarget }: Event): void => void ((currentTarget as HTMLDetailsElement).open = false);
  return (
    <details
      class="menu"
      onClick={(event) => (event.target as Element).closest("summary") ?? close(event)}
      onFocusOut={(event) => event.relatedTarget && !event.currentTarget.contains(event.relatedTarget as Node) && close(event)}
      onKeyDown={(event) => event.key === "Escape" && close(event)}
    >
      <summary class="button icon" aria-label={name} title={name}><Icon name="more" /></summary>
      <div>{children}</div>
    </details>
  );
}

/** A message at the corner of the window. Problems are alerts. */
export function Toast({ tone, onClose, children }: { tone: "bad" | "ok"; onClose?: () => void; children: ComponentChildren }): VNode {
  return (
    <div class={`toast ${tone}`} role={tone === "bad" ? "alert" : "status"}>
      <p>{children}</p>
      {onClose && <button class="plain small" onClick={onClose}>Close</button>}
    </div>
  );
}

/** Tabs of a page. The page keeps the open tab. */
export function Tabs<T extends string>({ all, open, onOpen, name }: { all: readonly (readonly [T, ComponentChildren])[]; open: T; onOpen: (tab: T) => void; name: string }): VNode {
  const moved = (event: KeyboardEvent): void => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const index = (all.findIndex(([tab]) => tab === open) + step + all.length) % all.length;
    onOpen(all[index]![0]);
    ((event.currentTarget as HTMLElement).children[index] as HTMLElement | undefined)?.focus();
  };
  return (
    <div class="tabs" role="tablist" aria-label={name} onKeyDown={moved}>
      {all.map(([tab, title]) => <button key={tab} type="button" role="tab" aria-selected={tab === open} tabIndex={tab === open ? 0 : -1} onClick={() => onOpen(tab)}>{title}</button>)}
    </div>
  );
}
