// Serves a page with CopilotKit whose agent is Pawl: PAWL_KEY=KEY node server.mjs PORT
import { createServer } from "node:http";
import { text } from "node:stream/consumers";
import { pipeline } from "node:stream/promises";
import { HttpAgent } from "@ag-ui/client";
import { AgentRunner, CopilotRuntime } from "@copilotkit/runtime/v2";
import { createCopilotNodeListener } from "@copilotkit/runtime/v2/node";
import { build } from "esbuild";
import { catchError, of, tap } from "rxjs";

const gateway = process.env.PAWL_GATEWAY ?? "http://127.0.0.1:7600";
const headers = { Authorization: `Bearer ${process.env.PAWL_KEY}`, "Content-Type": "application/json" };
const agent = () => new HttpAgent({ url: `${gateway}/agui`, headers });

// CopilotKit's own runner keeps threads in memory, and its stop only disconnects. This runner loads a thread from Pawl
// when a page returns, even after this process has restarted, and its stop cancels the run.
class PawlRunner extends AgentRunner {
  #runs = new Map(); // the run that each thread shows: Stop names it, so a late Stop cannot cancel a newer run
  #follow(threadId, events) {
    const error = ({ payload, message }) => of({ type: "RUN_ERROR", message: payload?.message ?? message });
    return events.pipe(
      tap(({ name, value }) => name === "pawl.run" && this.#runs.set(threadId, value.runId)),
      catchError(error),
    );
  }
  run({ agent, input }) {
    return this.#follow(input.threadId, agent.run(input));
  }
  connect({ threadId }) {
    const input = { threadId, runId: crypto.randomUUID(), messages: [], tools: [], context: [], state: {} };
    return this.#follow(threadId, agent().run(input));
  }
  async stop({ threadId }) {
    const body = JSON.stringify({ threadId, runId: this.#runs.get(threadId) });
    return (await fetch(`${gateway}/agui/cancel`, { method: "POST", headers, body })).ok;
  }
}

// Passes on the turns that background work starts in a thread, until the page leaves.
async function turns(threadId, response) {
  const left = new AbortController();
  response.on("close", () => left.abort());
  const body = JSON.stringify({ threadId, runId: crypto.randomUUID(), messages: [], forwardedProps: { pawl: { follow: true } } });
  const answer = await fetch(`${gateway}/agui`, { method: "POST", headers, body, signal: left.signal });
  if (answer.status >= 500) throw new Error(answer.statusText);
  response.writeHead(answer.status, { "Content-Type": answer.headers.get("content-type") });
  await pipeline(answer.body, response);
}

const runtime = new CopilotRuntime({ agents: { default: agent() }, runner: new PawlRunner() });
const copilotkit = createCopilotNodeListener({ runtime, basePath: "/copilotkit" });
const { outputFiles } = await build({
  entryPoints: ["page.tsx"],
  bundle: true,
  write: false,
  outdir: "/",
  format: "esm",
  jsx: "automatic",
  define: { "process.env.NODE_ENV": '"production"' },
  loader: { ".woff": "dataurl", ".woff2": "dataurl", ".ttf": "dataurl" },
});
const files = new Map(outputFiles.map(({ path, contents }) => [path, contents]));
files.set("/", '<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="/page.css"><script type="module" src="/page.js"></script>');
const types = { "/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript" };

const server = createServer(async (request, response) => {
  const { pathname, searchParams } = new URL(request.url, "http://page");
  if (pathname.startsWith("/copilotkit")) return copilotkit(request, response);
  // A broken connection makes the page try again.
  if (pathname === "/turns") return turns(searchParams.get("thread"), response).catch(() => response.destroy());
  // Other sites' pages cannot send this type.
  if (pathname === "/stop" && request.headers["content-type"] === "application/json") {
    const answer = await fetch(`${gateway}/agui/cancel`, { method: "POST", headers, body: await text(request) });
    return response.writeHead(answer.status, { "Content-Type": "application/json" }).end(await answer.text());
  }
  response.writeHead(files.has(pathname) ? 200 : 404, { "Content-Type": types[pathname] ?? "text/plain" });
  response.end(files.get(pathname));
});
// If the gateway breaks a stream, HttpAgent reports it and then also rejects a promise that is out of reach here.
process.on("unhandledRejection", (error) => console.error(error));
server.listen(Number(process.argv[2]), "127.0.0.1", () => console.log(`Open http://127.0.0.1:${process.argv[2]}`));
