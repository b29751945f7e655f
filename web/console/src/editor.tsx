/** Editors of an item: a form with the fields of a definition, or its JSON. The server validates both. */

import { PawlError } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { Dialog } from "./design/parts";
import { FieldView, type FieldSpec, meant } from "./fields";
import { pack, parse, unpack } from "./json";
import { keep, kept, path } from "./state";

/** An editor of an item. If `value` has no parameter, the editor creates an item. Without `fields`, it is edited as JSON. */
export interface Editing<T> {
  name: string;
  method: string;
  when?: (item: T) => boolean;
  value: (item: T) => unknown;
  save: (value: any, item: T) => Promise<unknown>;
  fields?: FieldSpec[] | ((item: T) => FieldSpec[] | undefined);
  dialog?: (item: T) => string; // Its button is the main one of the page, and it opens as a dialog with this title, which does not survive a reload.
  submit?: string; // The name of the button that sends it, by default Save.
  plain?: true; // The value is any JSON, not a message of the contract.
  parse?: (text: string) => unknown; // Reads texts that are not JSON, such as YAML.
  beside?: (value: Record<string, unknown> | undefined, text: string) => VNode; // What stands beside the editor, such as faults, or a place to try the value.
}

interface Refusal {
  message: string;
  field: string;
}

function read(text: string, parsed: (text: string) => unknown = parse): Record<string, unknown> | undefined {
  try {
    const value = parsed(text);
    return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Record<string, unknown>) : undefined;
  } catch {
    return undefined;
  }
}

/** The button that opens an editor, and the open editor. Without a dialog, it takes the place of the page's content. */
export interface Editor {
  button: VNode | null;
  form: VNode | null;
  isOpen: boolean;
  open: (value?: unknown) => void; // Opens it, if it creates an item with this value.
}

export function useEditor<T>(editing: Editing<T> | undefined, item: T, onSaved: () => void): Editor {
  const where = `${path.value} ${editing?.name}`;
  // Until it is edited, the text is the draft that an earlier visit left.
  const [own, show] = useState<{ text: string | undefined }>();
  const [message, setMessage] = useState("");
  const text = own ? own.text : kept(where) || undefined;
  if (!editing) return { button: null, form: null, isOpen: false, open: () => {} };
  const setText = (to?: string): void => {
    keep(where, editing.dialog ? "" : (to ?? ""));
    show({ text: to });
  };
  const open = (value: unknown = editing.value(item)): void => {
    setMessage("");
    setText(typeof value === "string" ? value : JSON.stringify(editing.plain ? value : unpack(value), null, 2));
  };
  const save = async (value: unknown): Promise<void> => {
    const answer = await editing.save(editing.plain ? value : pack(value), item);
    setText(undefined);
    setMessage(typeof answer === "string" ? answer : "Saved.");
    onSaved();
  };
  const title = editing.dialog?.(item);
  const button = <button class={item === undefined || title ? "" : "second"} onClick={() => open()}>{editing.name}</button>;
  if (text === undefined) return { button, form: message ? <p class="panel message" role="status">{message}</p> : null, isOpen: false, open };
  const form = <Open editing={editing} fields={typeof editing.fields === "function" ? editing.fields(item) : editing.fields} text={text} onText={setText} onSave={save} />;
  return title ? { button, form: <Dialog title={title} onClose={() => setText()}>{form}</Dialog>, isOpen: false, open } : { button: null, form, isOpen: true, open };
}

function Open<T>({ editing, fields, text, onText, onSave }: { editing: Editing<T>; fields: FieldSpec[] | undefined; text: string; onText: (text?: string) => void; onSave: (value: unknown) => Promise<void> }): VNode {
  const value = read(text, editing.parse);
  const [isRaw, setRaw] = useState(!fields || !value);
  const [fault, setFault] = useState<Refusal>();
  const [busy, setBusy] = useState(false);
  const form = useRef<HTMLFormElement>(null);
  const save = async (): Promise<void> => {
    const unreadable = form.current?.querySelector<HTMLElement>("[data-unreadable]");
    if (unreadable) return unreadable.focus();
    setBusy(true);
    try {
      await onSave((editing.parse ?? parse)(text));
    } catch (error) {
      setFault({ message: error instanceof Error ? error.message : String(error), field: error instanceof PawlError ? (error.metadata["field"] ?? "") : "" });
      setBusy(false);
    }
  };
  // Moves the focus to the field that the error names.
  useEffect(() => {
    if (!fault) return;
    const area = form.current?.querySelector<HTMLTextAreaElement>("textarea[data-json]");
    if (!area) return form.current?.querySelector<HTMLElement>("[aria-invalid=true]")?.focus();
    const name = fault.field.split(/[.[]/).filter((each) => each && !/^\d/.test(each)).pop()?.replace(/_(\w)/g, (_, letter: string) => letter.toUpperCase());
    const at = name ? text.indexOf(`"${name}"`) : -1;
    area.focus();
    if (at >= 0 && name) area.setSelectionRange(at, at + name.length + 2);
  }, [fault]);
  const known = meant(fields ?? [], fault?.field ?? "", value ?? {});
  const id = `fault-${editing.name.replaceAll(" ", "-")}`;
  const edited = (
    <form ref={form} class={`definition ${editing.dialog ? "" : "panel"}`} aria-label={editing.name} noValidate onSubmit={(event) => (event.preventDefault(), void save())}>
      {isRaw || !value || !fields ? (
        <div class={editing.parse ? "field numbered" : "field"}>
          {editing.parse && <pre aria-hidden="true">{text.split("\n").map((_, line) => `${line + 1}\n`)}</pre>}
          <textarea
            aria-label={`${editing.name} (${editing.parse ? "JSON or YAML" : "JSON"})`}
            data-json
            class="code"
            spellcheck={false}
            wrap={editing.parse && "off"}
            rows={Math.min(editing.parse ? Infinity : 24, text.split("\n").length + 1)}
            value={text}
            aria-invalid={!!fault}
            aria-describedby={fault ? id : undefined}
            onInput={(event) => onText(event.currentTarget.value)}
          />
        </div>
      ) : (
        <FieldView all={fields} value={value} onValue={(to) => onText(JSON.stringify(to, null, 2))} {...(known ? { fault: { at: known.at, message: fault?.message ?? "" } } : {})} />
      )}
      {fault && (isRaw || !known) && (
        <p id={id} class="fault" role="alert">
          {fault.field && !fault.message.includes(fault.field) && <strong>{fault.field}: </strong>}
          {fault.message}
        </p>
      )}
      <p class="buttons">
        <button disabled={busy}>{editing.submit ?? "Save"}</button>
        <button type="button" class="second" onClick={() => onText(undefined)}>Cancel</button>
        <span class="space" />
        {fields && !editing.dialog && <button type="button" class="plain small" aria-pressed={isRaw} disabled={!value} onClick={() => setRaw(!isRaw)}>{isRaw ? "Edit as a form" : "Edit as JSON"}</button>}
      </p>
    </form>
  );
  return editing.beside ? <div class="sided">{edited}<aside aria-label="Preview">{editing.beside(value, text)}</aside></div> : edited;
}
