/** Generic list and detail pages for agents, tools, rules, schedules and so on. */

import { PawlError } from "@pawl/client";
import type { ComponentChildren, VNode } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { type Action, Actions, RowActions } from "./actions";
import { Json } from "./cards";
import { type Column, Table } from "./design/table";
import { blank, Form, type Schema } from "./form";
import { pack, parse, unpack } from "./json";
import { type ListPath, MENU } from "./menu";
import { attempt, go, isAbsent, keep, kept, may, path, pawl, query } from "./state";
import { visible } from "./visible";

/** A filter of a list, kept in the URL. Without options it is a text field, with `on` a checkbox. */
export interface Filter {
  name: string;
  label: string;
  options?: readonly string[];
  on?: true;
}

/** An item that can be edited as JSON; the server validates it. If `value` takes no item, it is a new one. */
export interface Editing<T> {
  name: string;
  method: string;
  when?: (item: T) => boolean;
  value: (item: T) => unknown;
  save: (value: any, item: T) => Promise<unknown>;
}

export interface Page<T> {
  items: T[];
  next?: string | undefined;
}

export interface Resource<T> {
  path: ListPath;
  empty: string;
  list: (pageToken: string, filters: Record<string, string>) => Promise<Page<T>>;
  id: (item: T) => string;
  get?: (id: string) => Promise<T | undefined>;
  columns: Column<T>[];
  filters?: Filter[];
  actions?: Action<T>[];
  edit?: Editing<T>;
  make?: Editing<undefined>;
  /** The kind and name by which files can declare an item. Items that a set of files owns are read-only. */
  declared?: (item: T) => [string, string];
  above?: () => VNode | null;
  below?: (item: T) => ComponentChildren;
  /** Polls the first page. */
  live?: true;
  /** Heading of an item instead of its ID and first column. */
  title?: (item: T) => string;
  /** Calls `again` after each change of an item, which is then read again instead of polled. Returns a function that stops. */
  watch?: (id: string, again: () => void) => () => void;
}

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
  const buttons = { name: "Actions", of: (item: T) => <RowActions all={all} item={item} name={of.id(item).slice(-8)} onDone={load} /> };
  // Before the columns that a narrow window hides.
  const columns = all.some(({ inRows }) => inRows) ? [...of.columns.slice(0, 3), buttons, ...of.columns.slice(3)] : of.columns;
  return (
    <section class="page">
      <h1>{MENU[of.path].name}</h1>
      {of.above?.()}
      {of.filters && <Filters all={of.filters} values={filters} path={of.path} />}
      {of.make && may(of.make.method) && <Editor editing={of.make} item={undefined} onSaved={() => load()} />}
      {items?.length === 0 && <p class="empty">{of.empty}</p>}
      {!!items?.length && <Table name={MENU[of.path].name} columns={columns} items={items} to={(item) => `/${of.path}/${encodeURIComponent(of.id(item))}`} />}
      {next && (
        <button
          class="second"
          onClick={() => {
            setLong(true);
            load(next);
          }}
        >
          More
        </button>
      )}
    </section>
  );
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
  return (
    <section class="page">
      <p>
        <a href={`/${of.path}`}>{MENU[of.path].name}</a>
      </p>
      <h1>{visible(item && of.title ? of.title(item) : id)}</h1>
      {fault && <p class="fault" role="alert">{fault}</p>}
      {item && (
        <>
          <dl class="facts">
            {of.columns.slice(of.title ? 1 : 0).map(({ name, of: show }) => {
              const shown = show(item);
              return shown === undefined || shown === "" || shown === null ? null : (
                <div key={name}>
                  <dt>{name}</dt>
                  <dd>{shown}</dd>
                </div>
              );
            })}
          </dl>
          {set && <p class="quiet">Read-only: it belongs to the set {set}. Change its files and run pawl apply.</p>}
          <Actions all={(of.actions ?? []).filter(({ method }) => !set || !DELETES.test(method))} item={item} onDone={load} gone={() => go(`/${of.path}`)} />
          {!set && of.edit && may(of.edit.method) && (of.edit.when?.(item) ?? true) && <Editor editing={of.edit} item={item} onSaved={() => void load()} />}
          {of.below?.(item)}
          <details>
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
export function Below<T>({
  name,
  method,
  load,
  columns,
  act,
}: {
  name: string;
  method: string;
  load: () => Promise<T[] | undefined>;
  columns: Column<T>[];
  act?: (item: T, reload: () => void) => ComponentChildren;
}): VNode | null {
  const [items, setItems] = useState<T[]>();
  const reload = (): void => void attempt(async () => setItems((await load()) ?? []));
  useEffect(() => {
    if (may(method)) reload();
  }, []);
  if (!items) return null;
  const all = act ? [...columns, { name: "Actions", of: (item: T) => act(item, reload) }] : columns;
  return (
    <>
      <h2>{name}</h2>
      {items.length ? <Table name={name} columns={all} items={items} /> : <p class="quiet">Nothing yet.</p>}
    </>
  );
}

function Filters({ all, values, path }: { all: Filter[]; values: Record<string, string>; path: string }): VNode {
  const set = (name: string, value: string): void => {
    const next = new URLSearchParams(values);
    if (value) next.set(name, value);
    else next.delete(name);
    go(`/${path}${next.size ? `?${next}` : ""}`);
  };
  return (
    <div class="filters" role="search">
      {all.map(({ name, label, options, on }) => (
        <label key={name} class={on ? "row" : ""}>
          {on ? (
            <>
              <input type="checkbox" checked={!!values[name]} onChange={(event) => set(name, event.currentTarget.checked ? "1" : "")} /> {label}
            </>
          ) : (
            <>
              {label}
              {options ? (
                <select value={values[name] ?? ""} onChange={(event) => set(name, event.currentTarget.value)}>
                  <option value="">all</option>
                  {options.map((each) => (
                    <option key={each}>{each}</option>
                  ))}
                </select>
              ) : (
                <input data-first value={values[name] ?? ""} onChange={(event) => set(name, event.currentTarget.value.trim())} />
              )}
            </>
          )}
        </label>
      ))}
    </div>
  );
}

export function Editor<T>({ editing, item, onSaved }: { editing: Editing<T>; item: T; onSaved: () => void }): VNode {
  const where = `${path.value} ${editing.name}`;
  const [text, show] = useState(() => kept(where) || undefined);
  const setText = (to?: string): void => {
    keep(where, to ?? "");
    show(to);
  };
  const [fault, setFault] = useState<{ message: string; field: string }>();
  const [message, setMessage] = useState("");
  const area = useRef<HTMLTextAreaElement>(null);
  const id = `fault-${editing.name.replaceAll(" ", "-")}`;
  const refuse = (message: string, field = ""): void => {
    setFault({ message, field });
    // Selects the field in the text that the error names.
    const name = field.split(/[.[]/).filter((each) => each && !/^\d/.test(each)).pop()?.replace(/_(\w)/g, (_, letter: string) => letter.toUpperCase());
    const at = name ? (text ?? "").indexOf(`"${name}"`) : -1;
    area.current?.focus();
    if (at >= 0 && name) area.current?.setSelectionRange(at, at + name.length + 2);
  };
  const save = async (): Promise<void> => {
    try {
      const answer = await editing.save(pack(parse(text ?? "")), item);
      setText(undefined);
      setFault(undefined);
      setMessage(typeof answer === "string" ? answer : "Saved.");
      onSaved();
    } catch (error) {
      refuse(error instanceof Error ? error.message : String(error), error instanceof PawlError ? error.metadata["field"] : "");
    }
  };
  if (text === undefined)
    return (
      <p class="buttons">
        <button
          class="second"
          onClick={() => {
            setMessage("");
            setText(JSON.stringify(unpack(editing.value(item)), null, 2));
          }}
        >
          {editing.name}
        </button>
        {message && <span role="status">{message}</span>}
      </p>
    );
  return (
    <form
      class="card"
      onSubmit={(event) => {
        event.preventDefault();
        void save();
      }}
    >
      <label>
        {editing.name} (JSON)
        <textarea
          ref={area}
          class="code"
          rows={Math.min(24, text.split("\n").length + 1)}
          value={text}
          aria-invalid={!!fault}
          aria-describedby={fault ? id : undefined}
          onInput={(event) => setText(event.currentTarget.value)}
        />
      </label>
      {fault && (
        <p id={id} class="fault" role="alert">
          {fault.field && <strong>{fault.field}: </strong>}
          {fault.message}
        </p>
      )}
      <p class="buttons">
        <button>Save</button>
        <button
          type="button"
          class="second"
          onClick={() => {
            setText(undefined);
            setFault(undefined);
          }}
        >
          Cancel
        </button>
      </p>
    </form>
  );
}

/** A button that opens a form, which sends its values. Without named fields, the value is written as JSON. */
export function FormButton({
  name,
  save,
  schema,
  what = name,
  send,
}: {
  name: string;
  save: string;
  schema: Schema | undefined;
  what?: string;
  send: (value: Record<string, unknown>) => Promise<unknown>;
}): VNode {
  const [open, setOpen] = useState(false);
  const [value, setValue] = useState<Record<string, unknown> | undefined>(() => blank(schema));
  const [busy, setBusy] = useState(false);
  const [fault, setFault] = useState("");
  const shown = Object.keys(schema?.properties ?? {}).length ? schema : { properties: { input: { type: "object" } } };
  const submit = async (): Promise<void> => {
    setBusy(true);
    try {
      await send(value ?? {});
      setOpen(false);
      setValue(blank(schema));
      setFault("");
    } catch (error) {
      setFault(error instanceof Error ? error.message : String(error));
    }
    setBusy(false);
  };
  if (!open)
    return (
      <p class="buttons">
        <button onClick={() => setOpen(true)}>{name}</button>
      </p>
    );
  return (
    <form
      class="card"
      onSubmit={(event) => {
        event.preventDefault();
        void submit();
      }}
    >
      <Form schema={shown} value={value ?? {}} onValue={setValue} fault={fault} name={what} />
      <p class="buttons">
        <button disabled={busy || !value}>{save}</button>
        <button type="button" class="second" onClick={() => setOpen(false)}>
          Cancel
        </button>
      </p>
    </form>
  );
}
