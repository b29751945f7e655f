/** A form for a JSON Schema of a flat object. Other schemas are edited as JSON. */

import type { VNode } from "preact";
import { useId, useState } from "preact/hooks";

import { Fault, type FieldSpec, FieldView } from "./fields";
import { sentence } from "./format";
import { isBig, parse } from "./json";
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

export function Form({ schema, value, onValue, fault: refused = "", name: what = "Arguments", folds = false }: {
  schema: Schema | undefined;
  value: Record<string, unknown>;
  onValue: (value: Record<string, unknown> | undefined) => void;
  /** An error from the server, shown at the field with the error. */
  fault?: string;
  name?: string;
  /** Optional fields without a value are under "More options". */
  folds?: boolean;
}): VNode {
  const id = useId();
  const [fields, setFields] = useState(() => fieldsOf(schema, value)?.map((field): FieldSpec => (folds && isEmpty(value[field.at]) && !schema?.required?.includes(field.at) ? { ...field, more: true } : field)));
  const [raw, setRaw] = useState(fields ? undefined : JSON.stringify(value, null, 2));
  const [fault, setFault] = useState("");
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
  if (raw !== undefined || !fields) {
    const now = fault ? undefined : fieldsOf(schema, value);
    return (
      <div class="form">
        <label>
          {what} as JSON
          <textarea class="code" rows={Math.min(16, (raw ?? "").split("\n").length + 1)} value={raw} aria-invalid={!!(fault || refused)} aria-describedby={id} onInput={(event) => write(event.currentTarget.value)} />
        </label>
        <Fault text={fault || refused} id={id} />
        {now && <button type="button" class="plain" onClick={() => (setFields(now), setRaw(undefined))}>As a form</button>}
      </div>
    );
  }
  const [named] = fields.filter(({ at }) => refused.includes(at)).sort((one, other) => other.at.length - one.at.length);
  return (
    <div class="form">
      <FieldView all={fields} value={value} onValue={onValue} {...(named ? { fault: { at: named.at, message: refused } } : {})} />
      {!named && <Fault text={refused} />}
      <button type="button" class="plain" onClick={() => setRaw(JSON.stringify(value, null, 2))}>As JSON</button>
    </div>
  );
}

const isEmpty = (value: unknown): boolean => !value || (Array.isArray(value) && !value.length);
const isList = (value: unknown): value is string[] => Array.isArray(value) && value.every((each) => typeof each === "string");

/** Returns the fields for a schema and for further values; none if one of them has no field. */
export function fieldsOf(schema: Schema | undefined, value: Record<string, unknown>): FieldSpec[] | undefined {
  // Required fields come first: schemas are stored with sorted names.
  const names = [...new Set([...(schema?.required ?? []), ...Object.keys(schema?.properties ?? {}), ...Object.keys(value)])];
  const all = names.flatMap((at): FieldSpec[] => {
    const each = orNull(schema?.properties?.[at] ?? {});
    const [kind, isRequired] = [kindOf(each, value[at]), !!schema?.required?.includes(at)];
    // A dot would be a path.
    if (!kind || at.includes(".")) return [];
    const options = each.enum?.map((option) => [JSON.stringify(option), String(option)] as const) ?? [];
    return [
      {
        at,
        label: `${visible(each.title ? String(each.title) : sentence(at.replaceAll("_", " ")))}${isRequired ? " *" : ""}`,
        hint: visible(String(each.description ?? "")),
        kind,
        options: kind === "values" && !(isRequired && value[at] !== undefined) ? [["", "–"], ...options] : options,
        ...(isRequired || kind === "check" || kind === "lines" ? { keeps: true } : {}),
      },
    ];
  });
  return all.length === names.length ? all : undefined;
}

function kindOf(schema: Schema, value: unknown): FieldSpec["kind"] | undefined {
  if (typeof value === "object" && value !== null && !isList(value) && !isBig(value)) return undefined;
  if (schema.enum) return "values";
  if ("anyOf" in schema || "oneOf" in schema) return undefined;
  if (schema.type === "boolean" || typeof value === "boolean") return "check";
  if (schema.type === "number" || schema.type === "integer" || typeof value === "number" || isBig(value)) return "number";
  if (schema.type === "array" ? schema.items?.type === "string" : isList(value)) return "lines";
  if (schema.type !== undefined && schema.type !== "string") return undefined;
  const text = typeof value === "string" ? value : "";
  return text.length > 60 || text.includes("\n") || (schema.maxLength ?? 0) > 1000 ? "area" : "text";
}

/** Returns the schema of a nullable value. In a form, null is an empty field. */
function orNull({ anyOf, ...schema }: Schema): Schema {
  const [kind, other] = anyOf ?? [];
  if (!anyOf) return schema;
  return kind && anyOf.length === 2 && other?.type === "null" ? { ...schema, ...kind } : { ...schema, anyOf };
}

export function blank(schema: Schema | undefined): Record<string, unknown> {
  const initial = Object.entries(schema?.properties ?? {}).map(([name, each]) => [name, each.default ?? (each.type === "boolean" ? false : undefined)]);
  return Object.fromEntries(initial.filter(([, each]) => each !== undefined));
}

const SHOWN_MAX = 20_000;

export function Json({ value }: { value: unknown }): VNode {
  const text = typeof value === "string" ? value : (JSON.stringify(value, null, 2) ?? "");
  return <pre class="json" tabIndex={0}>{visible(text.length > SHOWN_MAX ? `${text.slice(0, SHOWN_MAX)}\n... (${text.length} characters)` : text)}</pre>;
}
