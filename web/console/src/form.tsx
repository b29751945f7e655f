/** A form for a JSON Schema of a flat object. Other schemas are edited as JSON. */

import type { VNode } from "preact";
import { useId, useState } from "preact/hooks";

import { BIG, isBig, parse } from "./json";
import { visible } from "./visible";

export interface Schema {
  type?: string;
  title?: string;
  description?: string;
  properties?: Record<string, Schema>;
  required?: string[];
  enum?: unknown[];
  maxLength?: number;
  items?: Schema;
  anyOf?: Schema[];
  default?: unknown;
}

export function Form({
  schema,
  value,
  onValue,
  fault: refused = "",
  name: what = "Arguments",
}: {
  schema: Schema | undefined;
  value: Record<string, unknown>;
  onValue: (value: Record<string, unknown> | undefined) => void;
  /** An error from the server, shown at the field with the error. */
  fault?: string;
  name?: string;
}): VNode {
  const id = useId();
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
      const read: unknown = parse(text);
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
          {what} as JSON
          <textarea
            class="code"
            rows={Math.min(16, raw.split("\n").length + 1)}
            value={raw}
            aria-invalid={!!(fault || refused)}
            aria-describedby={id}
            onInput={(event) => write(event.currentTarget.value)}
          />
        </label>
        <Fault text={fault || refused} id={id} />
        {isFlat(schema, value) && !fault && (
          <button type="button" class="plain" onClick={() => setRaw(undefined)}>
            As a form
          </button>
        )}
      </div>
    );
  // Required fields come first: schemas are stored with sorted names.
  const names = [...new Set([...(schema?.required ?? []), ...Object.keys(schema?.properties ?? {}), ...Object.keys(value)])];
  const meant = names.filter((name) => refused.includes(name)).sort((one, other) => other.length - one.length)[0];
  return (
    <div class="form">
      {names.map((name) => (
        <Field
          key={name}
          name={name}
          schema={orNull(schema?.properties?.[name] ?? {})}
          required={schema?.required?.includes(name) ?? false}
          value={value[name]}
          onValue={(to) => set(name, to)}
          fault={name === meant ? refused : ""}
        />
      ))}
      {meant === undefined && <Fault text={refused} />}
      <button type="button" class="plain" onClick={() => setRaw(JSON.stringify(value, null, 2))}>
        As JSON
      </button>
    </div>
  );
}

/** An error, also announced to screen readers. */
export function Fault({ text, id }: { text: string; id?: string }): VNode | null {
  return text ? <p class="fault" role="alert" {...(id ? { id } : {})}>{visible(text)}</p> : null;
}

interface FieldProps {
  name: string;
  schema: Schema;
  required: boolean;
  value: unknown;
  onValue: (value: unknown) => void;
  fault: string;
}

function Field(props: FieldProps): VNode {
  const id = useId();
  const { name, schema, required, value, fault } = props;
  const title = (
    <span>
      {visible(String(schema.title ?? name))}
      {required ? " *" : ""} {schema.description && <small class="quiet">{visible(String(schema.description))}</small>}
    </span>
  );
  const marks = { "aria-invalid": !!fault, "aria-describedby": fault ? id : undefined };
  const isSwitch = !schema.enum && (typeof value === "boolean" || schema.type === "boolean");
  return (
    <>
      <label class={isSwitch ? "row" : ""}>
        {!isSwitch && title}
        <Entry {...props} marks={marks} />
        {isSwitch && title}
      </label>
      <Fault text={fault} id={id} />
    </>
  );
}

function Entry({ schema, required, value, onValue, marks }: FieldProps & { marks: object }): VNode {
  if (schema.enum)
    return (
      <select {...marks} value={JSON.stringify(value) ?? ""} onChange={(event) => onValue(event.currentTarget.value === "" ? undefined : parse(event.currentTarget.value))}>
        {(!required || value === undefined) && <option value="">–</option>}
        {schema.enum.map((each) => (
          <option key={JSON.stringify(each)} value={JSON.stringify(each)}>
            {visible(String(each))}
          </option>
        ))}
      </select>
    );
  if (typeof value === "boolean" || schema.type === "boolean")
    return <input {...marks} type="checkbox" checked={value === true} onChange={(event) => onValue(event.currentTarget.checked)} />;
  if (typeof value === "number" || isBig(value) || schema.type === "number" || schema.type === "integer")
    return (
      <input
        {...marks}
        type="number"
        step={schema.type === "integer" ? 1 : "any"}
        value={value === undefined ? "" : JSON.stringify(value)}
        onInput={({ currentTarget: { value: text, valueAsNumber } }) => onValue(text === "" ? undefined : BIG.test(text) ? parse(text) : valueAsNumber)}
      />
    );
  if (isList(value) || schema.type === "array") {
    const lines = isList(value) ? value : [];
    return (
      <textarea
        {...marks}
        rows={Math.min(8, lines.length + 1)}
        placeholder="one per line"
        value={lines.join("\n")}
        onInput={(event) => onValue(event.currentTarget.value === "" ? [] : event.currentTarget.value.split("\n"))}
      />
    );
  }
  const text = value === undefined || value === null ? "" : String(value);
  const write = (text: string): void => onValue(text === "" && !required ? undefined : text);
  return text.length > 60 || text.includes("\n") || (schema.maxLength ?? 0) > 1000 ? (
    <textarea {...marks} rows={Math.min(8, text.split("\n").length + 1)} value={text} onInput={(event) => write(event.currentTarget.value)} />
  ) : (
    <input {...marks} value={text} onInput={(event) => write(event.currentTarget.value)} />
  );
}

function isList(value: unknown): value is string[] {
  return Array.isArray(value) && value.every((each) => typeof each === "string");
}

function isFlat(schema: Schema | undefined, value: Record<string, unknown>): boolean {
  const simple = (each: unknown): boolean => each === null || typeof each !== "object" || isList(each) || isBig(each);
  const kinds = new Set(["string", "number", "integer", "boolean", undefined]);
  const fits = (each: Schema): boolean => (each.type === "array" ? each.items?.type === "string" : kinds.has(each.type) && !("anyOf" in each) && !("oneOf" in each));
  return Object.values(value).every(simple) && Object.values(schema?.properties ?? {}).map(orNull).every(fits);
}

/** Returns the schema of a nullable value. In a form, null is an empty field. */
function orNull({ anyOf, ...schema }: Schema): Schema {
  const [kind, other] = anyOf ?? [];
  if (!anyOf) return schema;
  return kind && anyOf.length === 2 && other?.type === "null" ? { ...schema, ...kind } : { ...schema, anyOf };
}

/** Returns the initial values of a form. */
export function blank(schema: Schema | undefined): Record<string, unknown> {
  const initial = Object.entries(schema?.properties ?? {}).map(([name, each]) => [name, each.default ?? (each.type === "boolean" ? false : undefined)]);
  return Object.fromEntries(initial.filter(([, each]) => each !== undefined));
}

const SHOWN_MAX = 20_000;

export function Json({ value }: { value: unknown }): VNode {
  const text = typeof value === "string" ? value : (JSON.stringify(value, null, 2) ?? "");
  return <pre class="json" tabIndex={0}>{visible(text.length > SHOWN_MAX ? `${text.slice(0, SHOWN_MAX)}\n... (${text.length} characters)` : text)}</pre>;
}
