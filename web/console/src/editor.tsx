/** Editors of an item: a form with the fields of a definition, or its JSON. The server validates both. */

import { PawlError } from "@pawl/client";
import type { VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { FieldView, type FieldSpec, meant } from "./fields";
import { blank, Form, type Schema } from "./form";
import { pack, parse, unpack } from "./json";
import { keep, kept, path } from "./state";

/** An editor of an item. If `value` has no parameter, the editor creates an item. Without `fields`, it is edited as JSON. */
export interface Editing<T> {
  name: string;
  method: string;
  when?: (item: T) => boolean;
  value: (item: T) => unknown;
  save: (value: any, item: T) => Promise<unknown>;
  fields?: FieldSpec[];
  /** The name of the button that sends it, by default Save. */
  submit?: string;
}

interface Refusal {
  message: string;
  field: string;
}

function read(text: string): Record<string, unknown> | undefined {
  try {
    const value: unknown = parse(text);
    return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Record<string, unknown>) : undefined;
  } catch {
    return undefined;
  }
}

/** Returns the button that opens an editor, and the open editor. */
export function useEditor<T>(editing: Editing<T> | undefined, item: T, onSaved: () => void): { button: VNode | null; form: VNode | null } {
  const where = `${path.value} ${editing?.name}`;
  // Until it is edited, the text is the draft that an earlier visit left.
  const [own, show] = useState<{ text: string | undefined }>();
  const [message, setMessage] = useState("");
  const text = own ? own.text : kept(where) || undefined;
  if (!editing) return { button: null, form: null };
  const setText = (to?: string): void => {
    keep(where, to ?? "");
    show({ text: to });
  };
  const open = (): void => {
    setMessage("");
    setText(JSON.stringify(unpack(editing.value(item)), null, 2));
  };
  const save = async (value: unknown): Promise<void> => {
    const answer = await editing.save(pack(value), item);
    setText(undefined);
    setMessage(typeof answer === "string" ? answer : "Saved.");
    onSaved();
  };
  if (text !== undefined) return { button: null, form: <Open editing={editing} text={text} onText={setText} onSave={save} /> };
  return {
    button: (
      <button class={item === undefined ? "" : "second"} onClick={open}>
        {editing.name}
      </button>
    ),
    form: message ? <p class="panel message" role="status">{message}</p> : null,
  };
}

function Open<T>({ editing, text, onText, onSave }: { editing: Editing<T>; text: string; onText: (text?: string) => void; onSave: (value: unknown) => Promise<void> }): VNode {
  const value = read(text);
  const [isRaw, setRaw] = useState(!editing.fields || !value);
  const [fault, setFault] = useState<Refusal>();
  const [busy, setBusy] = useState(false);
  const form = useRef<HTMLFormElement>(null);
  const save = async (): Promise<void> => {
    const unreadable = form.current?.querySelector<HTMLElement>("[data-unreadable]");
    if (unreadable) return unreadable.focus();
    setBusy(true);
    try {
      await onSave(parse(text));
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
  const known = meant(editing.fields ?? [], fault?.field ?? "", value ?? {});
  const id = `fault-${editing.name.replaceAll(" ", "-")}`;
  return (
    <form
      ref={form}
      class="panel definition"
      aria-label={editing.name}
      noValidate
      onSubmit={(event) => {
        event.preventDefault();
        void save();
      }}
    >
      <div class="row">
        <h2>{editing.name}</h2>
        <span class="space" />
        {editing.fields && (
          <button type="button" class="second small" aria-pressed={isRaw} disabled={!value} onClick={() => setRaw(!isRaw)}>
            {isRaw ? "Edit as a form" : "Edit as JSON"}
          </button>
        )}
      </div>
      {isRaw || !value || !editing.fields ? (
        <div class="field">
          <label for={`${id}-json`}>{editing.name} (JSON)</label>
          <textarea
            id={`${id}-json`}
            data-json
            class="code"
            rows={Math.min(24, text.split("\n").length + 1)}
            value={text}
            aria-invalid={!!fault}
            aria-describedby={fault ? id : undefined}
            onInput={(event) => onText(event.currentTarget.value)}
          />
        </div>
      ) : (
        <FieldView all={editing.fields} value={value} onValue={(to) => onText(JSON.stringify(to, null, 2))} {...(known ? { fault: { at: known.at, message: fault?.message ?? "" } } : {})} />
      )}
      {fault && (isRaw || !known) && (
        <p id={id} class="fault" role="alert">
          {fault.field && !fault.message.includes(fault.field) && <strong>{fault.field}: </strong>}
          {fault.message}
        </p>
      )}
      <p class="buttons">
        <button disabled={busy}>{editing.submit ?? "Save"}</button>
        <button type="button" class="second" onClick={() => onText(undefined)}>
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
      class="panel"
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
