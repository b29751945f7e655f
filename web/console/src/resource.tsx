/** Generic list and detail pages for agents, tools, rules, schedules and so on. */

import { PawlError } from "@pawl/client";
import type { ComponentChildren, VNode } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { type Action, Actions, RowActions } from "./actions";
import { Json } from "./cards";
import { Empty, Fact, Head, Skeleton, Tabs } from "./design/parts";
import { type Column, Table } from "./design/table";
import { type Editing, useEditor } from "./editor";
import { type Option, Options } from "./fields";
import { time } from "./format";
import { unpack } from "./json";
import { type ListPath, MENU } from "./menu";
import { attempt, go, isAbsent, may, pawl, query } from "./state";
import { visible } from "./visible";

/** A filter of a list, kept in the URL. Without options it is a text field, with `on` a checkbox. */
export interface Filter {
  name: string;
  label: string;
  options?: readonly string[];
  linked?: true; // Shown only while it is set, by a link.
  load?: () => Promise<Option[]>; // Options that are read when the list opens.
  labels?: Record<string, string>; // Texts of the options.
  date?: true;
  on?: true;
}

export interface Page<T> {
  items: T[];
  next?: string | undefined;
}

export interface Resource<T> {
  path: ListPath;
  lead?: string; // The purpose of the page, in one sentence.
  empty: string;
  list: (pageToken: string, filters: Record<string, string>) => Promise<Page<T>>;
  id: (item: T) => string;
  get?: (id: string) => Promise<T | undefined>;
  columns: Column<T>[];
  filters?: Filter[];
  tabs?: { name: string; all: (readonly [value: string, label: string])[]; counts?: () => Promise<Record<string, string>> }; // A filter with few values, as tabs.
  actions?: Action<T>[];
  all?: Action<undefined>[]; // Actions on the whole list.
  edit?: Editing<T>;
  start?: Editing<T>; // A form that starts something with the item.
  make?: Editing<undefined>;
  declared?: (item: T) => [string, string]; // The kind and name of an item in files of `pawl apply`. Items that a set of files owns are read-only.
  above?: (reload: () => void) => VNode | null; // Stands beside the title of the list.
  after?: () => VNode; // Stands below the list.
  firsts?: [name: string, hint: string, value: unknown][]; // Ways to start in an empty list: name, explanation, and the value that the form opens with.
  about?: (item: T) => string | undefined; // The purpose of an item, below its title.
  below?: (item: T) => ComponentChildren;
  entry?: (item: T, reload: () => void) => VNode; // Lists items as sentences instead of a table, under headings with the days of `at`.
  at?: (item: T) => string | undefined;
  card?: (item: T, reload: () => void) => VNode;
  live?: true; // Polls the first page.
  title?: (item: T) => string; // Heading of an item instead of its ID and first column.
  watch?: (id: string, again: () => void) => () => void; // Calls `again` after each change of an item, which is then read again instead of polled. Returns a function that stops.
}

type Found<K extends string, T> = { [name in K]?: T[] } & { nextPageToken?: string };

/** Returns the pages of a method that lists items in a field of its response. */
export function paged<K extends string, T>(field: K, read: (page: { pageSize: number; pageToken: string }, filters: Record<string, string>) => Promise<Found<K, T>>): Resource<T>["list"] {
  return async (pageToken, filters) => {
    const found = await read({ pageSize: PAGE, pageToken }, filters);
    return { items: (found[field] as T[] | undefined) ?? [], next: found.nextPageToken };
  };
}

const PAGE = 100;
const PAGES_MAX = 20;
const LIVE_MS = 3000;
/** Time between two reads of an item that changes. */
const READ_MS = 1000;
const DELETES = /\/(Delete|Remove|Revoke)/;

/** Returns a function that does the work now, or once more after the work in progress, at most once a second. */
export function paced(work: () => Promise<unknown>): () => Promise<void> {
  let [isStale, isBusy] = [false, false];
  return async () => {
    isStale = true;
    if (isBusy) return;
    isBusy = true;
    for (; isStale; await new Promise((done) => setTimeout(done, READ_MS))) {
      isStale = false;
      await work();
    }
    isBusy = false;
  };
}

/** Reads a value when the page opens, when `of` changes, and every `ms`. Returns it with a function that reads it again. */
export function useRead<T>(read: () => Promise<T>, of: unknown[] = [], ms?: number): [T | undefined, () => void] {
  const [found, setFound] = useState<T>();
  const reads = useRef(0);
  const load = (isPoll = false): void => {
    const number = ++reads.current;
    void attempt(async () => {
      const next = await read();
      // Responses can arrive out of order. Only the latest request counts.
      if (number === reads.current) setFound(() => next);
    }, isPoll);
  };
  useEffect(() => {
    load(reads.current > 0);
    const timer = ms && setInterval(() => !document.hidden && load(true), ms);
    return () => void (reads.current++, clearInterval(timer));
  }, of);
  return [found, () => load()];
}

export function List<T>({ of }: { of: Resource<T> }): VNode {
  const [items, setItems] = useState<T[]>();
  const [next, setNext] = useState<string>();
  const filters = Object.fromEntries(query.value);
  const key = JSON.stringify(filters);
  const [isLong, setLong] = useState(false);
  const reads = useRef(0);
  const load = (pageToken = "", isPoll = false): void => {
    const read = ++reads.current;
    void attempt(async () => {
      const page = await of.list(pageToken, filters);
      // Responses can arrive out of order. Only the latest request counts.
      if (read !== reads.current) return;
      setItems((all) => (pageToken ? [...(all ?? []), ...page.items] : page.items));
      setNext(page.next);
    }, isPoll);
  };
  useEffect(() => {
    setLong(false);
    load();
  }, [key]);
  useEffect(() => {
    if (!of.live || isLong) return;
    const timer = setInterval(() => !document.hidden && load("", true), LIVE_MS);
    return () => clearInterval(timer);
  }, [key, isLong]);
  const all = of.actions ?? [];
  const hasButtons = items?.some((item) => all.some(({ inRows, method, when }) => inRows && may(method) && (when?.(item) ?? true)));
  const [counts = {}] = useRead(async () => of.tabs?.counts?.(), [of.path]);
  const buttons: Column<T> = { name: "Actions", size: 150, num: true, priority: 1, of: (item) => <RowActions all={all} item={item} name={of.id(item).slice(-8)} onDone={load} /> };
  const to = (item: T): string => `/${of.path}/${encodeURIComponent(of.id(item))}`;
  const { name } = MENU[of.path];
  const { button, form, isOpen, open } = useEditor(of.make && may(of.make.method) ? of.make : undefined, undefined, () => load());
  if (isOpen) return <section class="page"><Head title={of.make?.name} crumbs={[[`/${of.path}`, name]]} />{form}</section>;
  return (
    <section class="page">
      <Head title={name}>
        {of.above?.(load)}
        {of.all && <Actions all={of.all} item={undefined} onDone={() => load()} />}
        {button}
      </Head>
      {of.lead && <p class="lead">{of.lead}</p>}
      {form}
      <div class={of.tabs ? "views" : ""}>
        {of.tabs && <Tabs name="Filter" all={of.tabs.all.map(([value, label]) => [value, <>{label} {counts[value] && <small class="quiet">{counts[value]}</small>}</>] as const)} open={filters[of.tabs.name] ?? ""} onOpen={(to) => go(withFilter(of.path, filters, of.tabs!.name, to))} />}
        {of.filters && <Filters all={of.filters} values={filters} path={of.path} />}
      </div>
      {!items && <Skeleton />}
      {items?.length === 0 && (
        <Empty icon={of.path}>
          <p>{of.empty}</p>
          {button && of.firsts && <div class="firsts">{of.firsts.map(([first, hint, value]) => <button key={first} class="second" onClick={() => open(value)}><strong>{first}</strong><small>{hint}</small></button>)}</div>}
        </Empty>
      )}
      {of.entry &&
        days(items ?? [], of.at).map(([day, some]) => (
          <section key={day} aria-label={day}>
            <h2 class="day">{day}</h2>
            <ol class="entries">{some.map((item) => <li key={of.id(item)}>{of.entry!(item, load)}</li>)}</ol>
          </section>
        ))}
      {of.card && items?.map((item) => of.card!(item, load))}
      {!!items?.length && !of.entry && !of.card && <Table name={name} columns={hasButtons ? [...of.columns, buttons] : of.columns} items={items} to={to} />}
      {next && <p class="buttons more"><button class="second" onClick={() => (setLong(true), load(next))}>Show more</button></p>}
      {items && of.after?.()}
    </section>
  );
}

export function Entry({ tone, to, name, isUnread, said, at, children }: { tone: string; to: string; name: string; isUnread?: boolean; said?: string; at: string | undefined; children?: ComponentChildren }): VNode {
  return (
    <>
      <span class={`dot ${tone}`} />
      <span class="what">
        <a href={to} data-item class={isUnread ? "unread" : ""}>{isUnread && <span class="unseen">Unread: </span>}{visible(name)}</a>
        {said && <span class="quiet said">{said}</span>}
      </span>
      <span class="quiet links">{children}</span>
      <span class="quiet stamp">{time(at)}</span>
    </>
  );
}

/** Returns items with the same key together, in the order of the first ones. */
export function groups<T>(items: T[], key: (item: T) => string): T[][] {
  const found = new Map<string, T[]>();
  for (const item of items) found.set(key(item), [...(found.get(key(item)) ?? []), item]);
  return [...found.values()];
}

const DAY_MS = 86_400_000;

function days<T>(items: T[], at: (item: T) => string | undefined = () => undefined): [string, T[]][] {
  const [today, yesterday] = [0, DAY_MS].map((back) => new Date(Date.now() - back).toDateString());
  const found = new Map<string, T[]>();
  for (const item of items) {
    const date = new Date(at(item) ?? 0);
    const name = date.toDateString() === today ? "Today" : date.toDateString() === yesterday ? "Yesterday" : date.toLocaleDateString(undefined, { dateStyle: "full" });
    found.set(name, [...(found.get(name) ?? []), item]);
  }
  return [...found];
}

export function Detail<T>({ of, id }: { of: Resource<T>; id: string }): VNode {
  const [item, setItem] = useState<T>();
  const [fault, setFault] = useState("");
  const [isGone, setGone] = useState(false);
  const [set, setSet] = useState<string>();
  const load = async (): Promise<void> => {
    try {
      const found = of.get ? await of.get(id) : await search(of, id);
      if (found === undefined) throw new PawlError("not_found", "This item does not exist, or you have no access.");
      setSet(of.declared && (await owner(...of.declared(found))));
      setItem(found);
      setFault("");
      setGone(false);
    } catch (error) {
      setGone(isAbsent(error));
      setFault(error instanceof Error ? error.message : String(error));
    }
  };
  const again = useMemo(() => paced(load), [id]);
  useEffect(() => void again(), [id]);
  useEffect(() => {
    if (isGone) return;
    if (of.watch) return of.watch(id, () => void again());
    if (!of.live) return;
    const timer = setInterval(() => !document.hidden && void load(), LIVE_MS);
    return () => clearInterval(timer);
  }, [id, isGone]);
  const title = visible(item && of.title ? of.title(item) : id);
  const isEditable = !!item && !set && !!of.edit && may(of.edit.method) && (of.edit.when?.(item) ?? true);
  const { button, form, isOpen } = useEditor<T>(isEditable ? of.edit : undefined, item as T, () => void load());
  const start = useEditor<T>(item && of.start && may(of.start.method) && (of.start.when?.(item) ?? true) ? of.start : undefined, item as T, () => void load());
  if (isOpen) return <section class="page"><Head title={of.edit?.name} crumbs={[[`/${of.path}`, MENU[of.path].name], [location.pathname, title]]} />{form}</section>;
  return (
    <section class="page">
      <Head title={title} crumbs={[[`/${of.path}`, MENU[of.path].name]]}>
        {start.button}
        {button}
        {item && <Actions all={(of.actions ?? []).filter(({ method }) => !set || !DELETES.test(method))} item={item} onDone={load} gone={() => go(`/${of.path}`)} />}
      </Head>
      {fault && <p class="fault" role="alert">{fault}</p>}
      {!item && !fault && <Skeleton />}
      {item && (
        <>
          {start.form}
          {form}
          {of.about?.(item) && <p class="lead">{visible(of.about(item)!)}</p>}
          <dl class="facts inline">
            {of.columns.slice(1).filter(({ listed }) => !listed).map(({ name, of: show }) => {
              const shown = show(item);
              return shown === undefined || shown === "" || shown === null ? null : <Fact key={name} name={name} value={typeof shown === "string" ? visible(shown) : shown} />;
            })}
          </dl>
          {set && <p class="quiet">Read-only: it belongs to the set {set}. Change its files and run pawl apply.</p>}
          {of.below?.(item)}
          <details class="json">
            <summary>As JSON</summary>
            <Json value={unpack(item)} />
          </details>
        </>
      )}
    </section>
  );
}

async function owner(kind: string, name: string): Promise<string | undefined> {
  const { declarations } = await pawl.declarations.listDeclarations({});
  return declarations?.find((each) => each.kind === kind && each.name === name)?.set;
}

async function search<T>(of: Resource<T>, id: string): Promise<T | undefined> {
  let token: string | undefined = "";
  for (let page = 0; page < PAGES_MAX && token !== undefined; page++) {
    const { items, next }: Page<T> = await of.list(token, {});
    const found = items.find((each) => of.id(each) === id);
    if (found) return found;
    token = next || undefined;
  }
  return undefined;
}

/** A table below an item, loaded when the item is shown. `act` adds a column of buttons and gets a function to reload. */
export function Below<T>({ name, method, load, columns, act, to }: {
  name: string;
  method: string;
  load: () => Promise<T[] | undefined>;
  columns: Column<T>[];
  act?: (item: T, reload: () => void) => ComponentChildren;
  to?: (item: T) => string;
}): VNode | null {
  const [items, reload] = useRead(async () => (may(method) ? ((await load()) ?? []) : undefined));
  if (!items) return null;
  const all = act ? [...columns, { name: "Actions", size: 150, num: true as const, priority: 1 as const, of: (item: T) => act(item, reload) }] : columns;
  return (
    <>
      <h2>{name}</h2>
      {items.length ? <Table name={name} columns={all} items={items} {...(to ? { to } : {})} /> : <p class="quiet">Nothing yet.</p>}
    </>
  );
}

function Filters({ all, values, path }: { all: Filter[]; values: Record<string, string>; path: string }): VNode {
  const set = (name: string, value: string): void => go(withFilter(path, values, name, value));
  const some = all.filter(({ name, linked }) => !linked || values[name]);
  const fields = (
    <div class="filters" role="search">
      {some.map(({ name, label, options, load, labels = {}, date, on }) => {
        const value = values[name] ?? "";
        if (on)
          return <label key={name} class="row"><input type="checkbox" checked={!!value} onChange={(event) => set(name, event.currentTarget.checked ? "1" : "")} /> {label}</label>;
        if (!options && !date && !load) return <Words key={name} label={label} value={value} onValue={(to) => set(name, to)} />;
        return (
          <label key={name}>
            {label}
            {options && (
              <select value={value} onChange={(event) => set(name, event.currentTarget.value)}>
                <Options all={[["", "All"], ...options.map((each) => [each, labels[each] ?? each] as const)]} />
              </select>
            )}
            {date && <input type="date" value={value} onChange={(event) => set(name, event.currentTarget.value)} />}
            {load && <Loaded load={load} value={value} onValue={(to) => set(name, to)} />}
          </label>
        );
      })}
    </div>
  );
  if (some.length <= FOLDED_FROM || !matchMedia(NARROW).matches) return fields;
  return (
    <details class="fold" open={some.some(({ name }) => values[name])}>
      <summary>Filters</summary>
      {fields}
    </details>
  );
}

function withFilter(path: string, values: Record<string, string>, name: string, value: string): string {
  const { [name]: _, ...others } = values;
  const next = new URLSearchParams(value ? { ...others, [name]: value } : others);
  return `/${path}${next.size ? `?${next}` : ""}`;
}

function Loaded({ load, value, onValue }: { load: () => Promise<Option[]>; value: string; onValue: (value: string) => void }): VNode {
  const [all = []] = useRead(load);
  const options: Option[] = [["", "All"], ...all.filter(([name]) => name).map(([name]): Option => [name, name])];
  return <select value={value} onChange={(event) => onValue(event.currentTarget.value)}><Options all={options.some(([name]) => name === value) ? options : [...options, [value, value]]} /></select>;
}

/** On phones, more filters than this are folded. */
const FOLDED_FROM = 1;
const NARROW = "(max-width: 720px)";

/** A text filter, applied when the field loses focus. Reading the list again does not change typed text. */
function Words({ label, value, onValue }: { label: string; value: string; onValue: (value: string) => void }): VNode {
  const [text, setText] = useState(value);
  const [applied, setApplied] = useState(value);
  if (applied !== value) {
    setApplied(value);
    setText(value);
  }
  return <input type="search" data-first aria-label={label} placeholder={label} value={text} onInput={(event) => setText(event.currentTarget.value)} onChange={(event) => onValue(event.currentTarget.value.trim())} />;
}
