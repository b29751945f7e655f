/** Fields of a definition, each at a path such as options.model. Values without a field stay unchanged. */

import type { ComponentChildren, VNode } from "preact";
import { useEffect, useId, useState } from "preact/hooks";

import { BIG, isBig, parse } from "./json";
import { visible } from "./visible";

export type Values = Record<string, any>;
export type Option = readonly [value: string, label: string];

export interface FieldSpec {
  at: string;
  label: string;
  hint?: string;
  /**
   * A text line by default. `lines` is a list with one entry per line, `pairs` a map with one "name: value" per line. The
   * options of `values` are JSON. `choice` is a group of exclusive options.
   */
  kind?: "text" | "area" | "number" | "check" | "lines" | "pairs" | "json" | "select" | "values" | "suggest" | "moment" | "choice" | "own";
  blanks?: Record<string, Values>; // With these, a choice is between members of the message at the path: the initial members for each option.
  keeps?: true; // Keeps values that are false or empty, instead of removing them.
  options?: readonly Option[];
  load?: () => Promise<Option[]>; // Options that are read when the form opens.
  view?: (props: { value: Values; onValue: (value: Values) => void; id: string }) => VNode; // Draws a field of its own kind.
  when?: (value: Values) => boolean;
  half?: true; // Has half of the width.
  more?: true; // Is under "More options".
  placeholder?: string;
}

export function get(value: Values, at: string): any {
  return at.split(".").reduce<any>((found, name) => (typeof found === "object" && found !== null ? found[name] : undefined), value);
}

/** Returns a copy with a value at a path. Without a value, the path is removed. */
export function set(value: Values, at: string, to: unknown): Values {
  const [name = "", ...rest] = at.split(".");
  const next = { ...value };
  const inner = rest.length ? set(typeof next[name] === "object" && next[name] !== null ? next[name] : {}, rest.join("."), to) : to;
  if (inner === undefined) delete next[name];
  else next[name] = inner;
  return next;
}

/** Returns the field that an error names, such as definition.options.model. */
export function meant(all: FieldSpec[], field: string, value: Values): FieldSpec | undefined {
  const name = field.replace(/_(\w)/g, (_, letter: string) => letter.toUpperCase());
  const shown = all.filter(({ when }) => when?.(value) ?? true);
  return shown.find(({ at }) => name === at || name.endsWith(`.${at}`) || field.endsWith(`.${at}`)) ?? shown.find(({ at }) => name && (at.endsWith(`.${name}`) || `.${name}.`.includes(`.${at.split(".").at(-1)}.`)));
}

interface Props {
  all: FieldSpec[];
  value: Values;
  onValue: (value: Values) => void;
  fault?: { at: string; message: string };
}

export function FieldView({ all, ...rest }: Props): VNode {
  const shown = all.filter(({ when }) => when?.(rest.value) ?? true);
  const more = shown.filter((field) => field.more);
  const isUsed = more.some(({ at }) => rest.fault?.at === at);
  return (
    <div class="form-grid">
      {shown.filter((field) => !field.more).map((field) => <Field key={field.at + field.label} field={field} {...rest} />)}
      {!!more.length && (
        <details open={isUsed || undefined}>
          <summary>More options</summary>
          <div class="form-grid">{more.map((field) => <Field key={field.at + field.label} field={field} {...rest} />)}</div>
        </details>
      )}
    </div>
  );
}

function Field({ field, value, onValue, fault }: { field: FieldSpec } & Omit<Props, "all">): VNode {
  const id = useId();
  const { at, label, hint, kind, view } = field;
  const message = fault?.at === at ? fault.message : "";
  const marks = { id, "aria-invalid": !!message, "aria-describedby": [hint && `${id}-hint`, message && `${id}-fault`].filter(Boolean).join(" ") || undefined };
  const below = (
    <>
      {hint && <span id={`${id}-hint`} class="hint">{hint}</span>}
      <Fault text={message} id={`${id}-fault`} />
    </>
  );
  if (kind === "own" || kind === "choice")
    return (
      <div class="field" role="group" aria-labelledby={`${id}-label`}>
        <span id={`${id}-label`} class="label">{label}</span>
        {kind === "own" ? view?.({ value, onValue, id }) : <Chosen field={field} value={value} onValue={onValue} />}
        {below}
      </div>
    );
  const entry = <Entry field={field} value={get(value, at)} onValue={(to) => onValue(set(value, at, to))} marks={marks} />;
  if (kind === "check")
    return (
      <div class={`field ${field.half ? "half" : ""}`}>
        <label class="row">{entry} <span>{label}</span></label>
        {below}
      </div>
    );
  return (
    <div class={`field ${field.half ? "half" : ""}`}>
      <label for={id}>{label}</label>
      {entry}
      {below}
    </div>
  );
}

function Chosen({ field: { at, label, options = [], blanks }, value, onValue }: { field: FieldSpec } & Omit<Props, "all">): VNode {
  const within: Values = (at ? get(value, at) : value) ?? {};
  const now = blanks ? (options.find(([name]) => name in within) ?? options[0])?.[0] : get(value, at);
  const choose = (to: string): void => {
    if (!blanks) return onValue(set(value, at, to));
    const members = Object.values(blanks).flatMap(Object.keys);
    const next = { ...Object.fromEntries(Object.entries(within).filter(([name]) => !members.includes(name))), ...blanks[to] };
    onValue(at ? set(value, at, next) : next);
  };
  return <Choice name={label} value={now ?? ""} onValue={choose} all={options} />;
}

interface EntryProps {
  field: FieldSpec;
  value: any;
  onValue: (value: unknown) => void;
  marks: Record<string, unknown> & { id: string };
}

function Entry({ field: { kind, options, load, placeholder = "", keeps }, value, onValue, marks }: EntryProps): VNode {
  const [loaded, setLoaded] = useState<readonly Option[]>(options ?? []);
  useEffect(() => void load?.().then(setLoaded, () => {}), []);
  const text = value === undefined || value === null ? "" : isBig(value) ? JSON.stringify(value) : String(value);
  const write = (to: string): void => onValue(to === "" && !keeps ? undefined : to);
  switch (kind) {
    case "check":
      return <input {...marks} type="checkbox" checked={value === true} onChange={(event) => onValue(event.currentTarget.checked || (keeps ? false : undefined))} />;
    case "number":
      return <input {...marks} type="number" step="any" placeholder={placeholder} value={text} onInput={({ currentTarget: { value: to, valueAsNumber } }) => onValue(to === "" ? undefined : BIG.test(to) ? parse(to) : valueAsNumber)} />;
    case "values":
      return <select {...marks} value={JSON.stringify(value) ?? ""} onChange={({ currentTarget: { value: to } }) => onValue(to ? parse(to) : undefined)}><Options all={loaded} /></select>;
    case "select": {
      const all = text && !loaded.some(([each]) => each === text) ? [...loaded, [text, text] as const] : loaded;
      return <select {...marks} value={text} onChange={(event) => write(event.currentTarget.value)}><Options all={all} /></select>;
    }
    case "area":
      return <textarea {...marks} rows={Math.min(14, Math.max(4, text.split("\n").length + 1))} placeholder={placeholder} value={text} onInput={(event) => write(event.currentTarget.value)} />;
    case "lines": {
      const lines: unknown[] = Array.isArray(value) ? value : [];
      return <textarea {...marks} rows={Math.min(8, lines.length + 1)} placeholder={placeholder || "One per line"} value={lines.join("\n")} onInput={({ currentTarget: { value: to } }) => onValue(to === "" ? (keeps ? [] : undefined) : to.split("\n"))} />;
    }
    case "moment":
      return <input {...marks} type="datetime-local" value={value ? local(value) : ""} onInput={({ currentTarget: { value: to } }) => onValue(to ? new Date(to).toISOString() : undefined)} />;
    case "pairs":
      return <Draft marks={marks} placeholder={placeholder} first={Object.entries(value ?? {}).map(([name, to]) => `${name}: ${to}`).join("\n")} onText={(to) => onValue(pairs(to))} />;
    case "json":
      return <Draft marks={marks} placeholder="{}" first={value === undefined ? "" : JSON.stringify(value, null, 2)} onText={(to) => onValue(to.trim() ? parse(to) : undefined)} />;
    default:
      return (
        <>
          <input {...marks} list={kind === "suggest" ? `${marks.id}-list` : undefined} autocomplete="off" placeholder={placeholder} value={text} onInput={(event) => write(event.currentTarget.value)} />
          {kind === "suggest" && <datalist id={`${marks.id}-list`}><Options all={loaded} /></datalist>}
        </>
      );
  }
}

/** An error message, also announced to screen readers. */
export function Fault({ text, id }: { text: string; id?: string }): VNode | null {
  return text ? <p class="fault" role="alert" {...(id ? { id } : {})}>{visible(text)}</p> : null;
}

/** A time in the format of a local time field. */
function local(at: string): string {
  return new Date(Date.parse(at) - new Date(at).getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}

function pairs(text: string): Record<string, string> | undefined {
  const lines = text.split("\n").filter((line) => line.trim());
  const all = lines.map((line) => {
    const at = line.indexOf(":");
    if (at < 1) throw new Error(`"${line}" has no colon.`);
    return [line.slice(0, at).trim(), line.slice(at + 1).trim()];
  });
  return all.length ? Object.fromEntries(all) : undefined;
}

/** A text field that has a value only while its text is valid. */
function Draft({ first, onText, marks, placeholder }: { first: string; onText: (text: string) => void; marks: EntryProps["marks"]; placeholder: string }): VNode {
  const [text, setText] = useState(first);
  const [fault, setFault] = useState("");
  const write = (to: string): void => {
    setText(to);
    try {
      onText(to);
      setFault("");
    } catch (error) {
      setFault(error instanceof Error ? error.message : String(error));
    }
  };
  return (
    <>
      <textarea {...marks} data-unreadable={fault ? "" : undefined} class="code" rows={Math.min(12, text.split("\n").length + 1)} placeholder={placeholder} aria-invalid={!!fault || marks["aria-invalid"] === true} value={text} onInput={(event) => write(event.currentTarget.value)} />
      <Fault text={fault} />
    </>
  );
}

export function Options({ all }: { all: readonly (readonly [string | number, string])[] }): VNode {
  return <>{all.map(([value, label]) => <option key={value} value={value}>{visible(label)}</option>)}</>;
}

/** Checkboxes for some of all values. An empty list means all of them, so the last one cannot be cleared. */
export function Checks({ all, chosen, onChosen }: { all: readonly Option[]; chosen: readonly string[] | undefined; onChosen: (chosen: string[]) => void }): VNode {
  const now = chosen?.length ? chosen : all.map(([value]) => value);
  return (
    <div class="checks">
      {all.map(([value, label]) => (
        <label key={value} class="row">
          <input
            type="checkbox"
            checked={now.includes(value)}
            disabled={now.length === 1 && now[0] === value}
            onChange={(event) => onChosen(event.currentTarget.checked ? [...now, value] : now.filter((each) => each !== value))}
          />
          {label}
        </label>
      ))}
    </div>
  );
}

/** A list of rows that can be added and removed. */
export function Several({ all, onAll, blank, add, row }: { all: Values[]; onAll: (all: Values[]) => void; blank: Values; add: string; row: (item: Values, onItem: (item: Values) => void, number: number) => VNode }): VNode {
  return (
    <>
      {all.map((item, index) => (
        <div key={index} class="rowset">
          {row(item, (to) => onAll(all.map((each, at) => (at === index ? to : each))), index + 1)}
          <button type="button" class="second small" aria-label={`Remove row ${index + 1}`} onClick={() => onAll(all.filter((_, at) => at !== index))}>Remove</button>
        </div>
      ))}
      <p class="buttons"><button type="button" class="second small" onClick={() => onAll([...all, blank])}>{add}</button></p>
    </>
  );
}

/** A group of exclusive choices. */
export function Choice({ name, all, value, onValue }: { name: string; all: readonly (readonly [string, ComponentChildren])[]; value: string; onValue: (value: string) => void }): VNode {
  return (
    <div class="choice" role="radiogroup" aria-label={name}>
      {all.map(([each, label]) => <label key={each} class="row"><input type="radio" name={name} checked={each === value} onChange={() => onValue(each)} /> <span>{label}</span></label>)}
    </div>
  );
}
