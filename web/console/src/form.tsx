/** A form from a JSON Schema: flat objects of texts, numbers, choices and switches; everything else is edited as JSON. */

import type { VNode } from "preact";
import { useState } from "preact/hooks";

interface Schema {
  type?: string;
  title?: string;
  description?: string;
  properties?: Record<string, Schema>;
  required?: string[];
  enum?: unknown[];
  maxLength?: number;
}

export function Form({
  schema,
  value,
  onValue,
}: {
  schema: Schema | undefined;
  value: Record<string, unknown>;
  onValue: (value: Record<string, unknown> | undefined) => void;
}): VNode {
  const [raw, setRaw] = useState<string | undefined>(isFlat(schema, value) ? undefined : JSON.stringify(value, null, 2));
  const [fault, setFault] = useState("");
  const set = (name: string, to: unknown): void => {
    const next = { ...value };
    if (to === undefined) delete next[name];
    else next[name] = to;
    onValue(next);
  };
  const write = (text: string): void => {
    setRaw(text);
    try {
      const read: unknown = JSON.parse(text);
      if (typeof read !== "object" || read === null || Array.isArray(read)) throw new Error("The arguments must be an object.");
      setFault("");
      onValue(read as Record<string, unknown>);
    } catch (error) {
      setFault(String(error instanceof Error ? error.message : error));
      onValue(undefined);
    }
  };
  if (raw !== undefined)
    return (
      <div class="form">
        <label>
          Arguments as JSON
          <textarea class="code" rows={Math.min(16, raw.split("\n").length + 1)} value={raw} onInput={(event) => write(event.currentTarget.value)} />
        </label>
        {fault && <p class="fault" role="alert">{fault}</p>}
        {isFlat(schema, value) && !fault && (
          <button type="button" class="plain" onClick={() => setRaw(undefined)}>
            As a form
          </button>
        )}
      </div>
    );
  const names = [...new Set([...Object.keys(schema?.properties ?? {}), ...Object.keys(value)])];
  return (
    <div class="form">
      {names.map((name) => (
        <Field
          key={name}
          name={name}
          schema={schema?.properties?.[name] ?? {}}
          required={schema?.required?.includes(name) ?? false}
          value={value[name]}
          onValue={(to) => set(name, to)}
        />
      ))}
      <button type="button" class="plain" onClick={() => setRaw(JSON.stringify(value, null, 2))}>
        As JSON
      </button>
    </div>
  );
}

function Field({
  name,
  schema,
  required,
  value,
  onValue,
}: {
  name: string;
  schema: Schema;
  required: boolean;
  value: unknown;
  onValue: (value: unknown) => void;
}): VNode {
  const label = (
    <span>
      {schema.title ?? name}
      {required ? " *" : ""} {schema.description && <small class="quiet">{schema.description}</small>}
    </span>
  );
  if (schema.enum)
    return (
      <label>
        {label}
        <select value={JSON.stringify(value)} onChange={(event) => onValue(event.currentTarget.value === "" ? undefined : JSON.parse(event.currentTarget.value))}>
          {!required && <option value="">–</option>}
          {schema.enum.map((each) => (
            <option key={JSON.stringify(each)} value={JSON.stringify(each)}>
              {String(each)}
            </option>
          ))}
        </select>
      </label>
    );
  if (typeof value === "boolean" || schema.type === "boolean")
    return (
      <label class="row">
        <input type="checkbox" checked={value === true} onChange={(event) => onValue(event.currentTarget.checked)} /> {label}
      </label>
    );
  if (typeof value === "number" || schema.type === "number" || schema.type === "integer")
    return (
      <label>
        {label}
        <input
          type="number"
          step={schema.type === "integer" ? 1 : "any"}
          value={value === undefined ? "" : String(value)}
          onInput={(event) => onValue(event.currentTarget.value === "" ? undefined : event.currentTarget.valueAsNumber)}
        />
      </label>
    );
  const text = value === undefined ? "" : String(value);
  return (
    <label>
      {label}
      {text.length > 60 || text.includes("\n") || (schema.maxLength ?? 0) > 200 ? (
        <textarea rows={Math.min(8, text.split("\n").length + 1)} value={text} onInput={(event) => onValue(event.currentTarget.value)} />
      ) : (
        <input value={text} onInput={(event) => onValue(event.currentTarget.value === "" && !required ? undefined : event.currentTarget.value)} />
      )}
    </label>
  );
}

function isFlat(schema: Schema | undefined, value: Record<string, unknown>): boolean {
  const simple = (each: unknown): boolean => each === null || typeof each !== "object";
  const kinds = new Set(["string", "number", "integer", "boolean", undefined]);
  return (
    Object.values(value).every(simple) &&
    Object.values(schema?.properties ?? {}).every((each) => kinds.has(each.type) && !("anyOf" in each) && !("oneOf" in each))
  );
}
