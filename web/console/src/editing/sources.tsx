/** Sources of tools: MCP servers, OpenAPI documents and HTTP endpoints. */

import type { SourceJson } from "@pawl/client";
import type { VNode } from "preact";

import { removal } from "../actions";
import { Badge, type Tone } from "../design/parts";
import { Table } from "../design/table";
import { type FieldSpec, type Values } from "../fields";
import { cut, short, time } from "../format";
import { paged, type Resource } from "../resource";
import { pawl } from "../state";
import { Care } from "./agents";

const KINDS = ["mcpHttp", "mcpStdio", "openApi", "httpEndpoint"] as const;
const NAMES: Record<string, string> = { mcpHttp: "MCP server", mcpStdio: "MCP program", openApi: "OpenAPI", httpEndpoint: "HTTP endpoint" };
const BLANK: Record<string, Values> = { mcpHttp: { url: "https://" }, mcpStdio: { command: [] }, openApi: { documentUrl: "https://" }, httpEndpoint: { url: "https://", method: "GET", description: "", argumentsSchemaJson: { type: "object", properties: {} } } };
const kindOf = (value: Values): string => KINDS.find((kind) => kind in value) ?? "mcpHttp";
/** The address or program of a source. */
const placeOf = ({ mcpHttp, mcpStdio, openApi, httpEndpoint }: NonNullable<SourceJson["config"]>): string => mcpHttp?.url ?? mcpStdio?.command?.join(" ") ?? httpEndpoint?.url ?? openApi?.documentUrl ?? openApi?.baseUrl ?? "A document without a URL";
const STATES: Record<string, Tone> = { SOURCE_STATE_READY: "ok", SOURCE_STATE_CHANGED: "warn", SOURCE_STATE_UNREACHABLE: "bad" };

const KIND: FieldSpec = {
  at: "", label: "Kind", kind: "choice",
  blanks: Object.fromEntries(KINDS.map((kind) => [kind, { [kind]: BLANK[kind] }])),
  options: [
    ["mcpHttp", "An MCP server with a URL"],
    ["mcpStdio", "An MCP server that Pawl starts as a program"],
    ["openApi", "An OpenAPI document: each operation becomes a tool"],
    ["httpEndpoint", "One HTTP endpoint: it becomes one tool"],
  ],
};

const of = (kind: string, all: FieldSpec[]): FieldSpec[] => all.map((field) => ({ ...field, at: `${kind}.${field.at}`, when: (value) => kindOf(value) === kind }));
const HEADERS: FieldSpec[] = [
  { at: "headers", label: "Headers", kind: "pairs", more: true, half: true, placeholder: "x-team: support" },
  { at: "secretHeaders", label: "Headers with secrets", kind: "pairs", more: true, half: true, placeholder: "authorization: crm-token", hint: "Header and name of the secret." },
];
const FIELDS: FieldSpec[] = [
  KIND,
  ...of("mcpHttp", [{ at: "url", label: "URL" }, { at: "stateless", label: "Users can share a session", kind: "check", more: true }, ...HEADERS]),
  ...of("mcpStdio", [
    { at: "command", label: "Program and arguments", kind: "lines", hint: "One per line." },
    { at: "environment", label: "Environment", kind: "pairs", half: true, placeholder: "LOG_LEVEL: info" },
    { at: "secretEnvironment", label: "Environment with secrets", kind: "pairs", half: true, placeholder: "TOKEN: crm-token", hint: "Variable and name of the secret." },
    { at: "readablePaths", label: "Folders it may read", kind: "lines", half: true },
    { at: "writablePaths", label: "Folders it may write", kind: "lines", half: true },
    { at: "stateless", label: "Users can share a process", kind: "check", more: true },
  ]),
  ...of("openApi", [
    { at: "documentUrl", label: "URL of the document" },
    { at: "baseUrl", label: "Base URL", placeholder: "The document's first server" },
    { at: "operationIds", label: "Operations", kind: "lines", hint: "IDs, one per line. Without one, all become tools." },
    ...HEADERS,
  ]),
  ...of("httpEndpoint", [
    { at: "url", label: "URL", hint: "With {argument} placeholders." },
    { at: "method", label: "Method", kind: "select", half: true, options: ["GET", "POST", "PUT", "PATCH", "DELETE"].map((each) => [each, each] as const) },
    { at: "idempotencyHeader", label: "Header for the idempotency key", half: true },
    { at: "description", label: "Description for the model", kind: "area" },
    { at: "argumentsSchemaJson", label: "JSON Schema of the arguments", kind: "json" },
    ...HEADERS,
  ]),
];

async function add(config: object, replace: boolean): Promise<string> {
  const { source, leftOut = [] } = await pawl.sources.addSource({ config, replace });
  const left = leftOut.length ? ` ${leftOut.length} cannot be registered: ${leftOut.map(({ name }) => name).join(", ")}.` : "";
  return `Saved with ${source?.tools?.length ?? 0} tools.${left}`;
}

export const sources: Resource<SourceJson> = {
  path: "sources",
  lead: "A source provides tools from an MCP server, an OpenAPI document or an HTTP endpoint. By saving a source, you approve the definitions of its tools.",
  declared: ({ config }) => ["source", config?.name ?? ""],
  empty: "No sources. Where do your tools come from?",
  firsts: [
    ["MCP server", "A server with a URL offers its tools.", { name: "", mcpHttp: BLANK["mcpHttp"] }],
    ["OpenAPI document", "Each operation of an API becomes a tool.", { name: "", openApi: BLANK["openApi"] }],
    ["HTTP endpoint", "One address becomes one tool.", { name: "", httpEndpoint: BLANK["httpEndpoint"] }],
  ],
  list: paged("sources", () => pawl.sources.listSources({})),
  id: ({ config }) => config?.name ?? "",
  columns: [
    { name: "Name", icon: () => "sources", of: ({ config }) => config?.name, under: ({ config = {}, problem }) => (problem ? <span class="fault">{cut(problem)}</span> : cut(placeOf(config))) },
    { name: "Kind", size: 140, priority: 2, of: ({ config }) => NAMES[kindOf(config ?? {})] },
    { name: "State", size: 130, priority: 1, of: ({ state = "" }) => <Badge tone={STATES[state] ?? "grey"}>{short(state, "SOURCE_STATE_")}</Badge> },
    { name: "Tools", size: 90, priority: 1, num: true, listed: true, of: ({ tools = [] }) => `${tools.length} ${tools.length === 1 ? "tool" : "tools"}` },
    { name: "Problem", detailed: true, of: ({ problem }) => cut(problem) },
    { name: "Saved", size: 110, priority: 3, num: true, of: ({ createTime }) => time(createTime) },
  ],
  make: {
    name: "New source", method: "tool.v1.SourceService/AddSource", value: () => ({ name: "", mcpHttp: BLANK["mcpHttp"] }),
    save: (config) => add(config, false),
    fields: [{ at: "name", label: "Name", hint: "Lower-case letters, digits, - and _. Its tools are called name.tool." }, ...FIELDS],
  },
  edit: { name: "Edit source", method: "tool.v1.SourceService/AddSource", value: ({ config }) => config, save: (config) => add(config, true), fields: FIELDS },
  actions: [
    {
      name: "Check", method: "tool.v1.SourceService/CheckSource",
      run: async ({ config }) => {
        const { changes = [] } = await pawl.sources.checkSource({ name: config?.name ?? "" });
        return changes.length ? `Changed: ${changes.map(({ toolName }) => toolName).join(", ")}` : "No changes since approval.";
      },
    },
    removal("Remove", "tool.v1.SourceService/RemoveSource", ({ config }) => pawl.sources.removeSource({ name: config?.name ?? "" })),
  ],
  below: ({ tools = [] }) => (
    <>
      <h2>Tools</h2>
      {tools.length ? (
        <Table
          name="Tools"
          items={tools}
          to={({ definition }) => `/tools/${encodeURIComponent(definition?.name ?? "")}`}
          columns={[
            { name: "Name", of: ({ definition }) => definition?.name, under: ({ definition }) => cut(definition?.description) },
            { name: "Approval", size: 130, priority: 1, of: ({ definition }) => <Care category={definition?.category} /> },
          ]}
        />
      ) : (
        <p class="quiet">None.</p>
      )}
    </>
  ),
};
