// Front ends on a published client of AG-UI, which knows nothing of Pawl: front_end.mjs PACKAGE. Each line of the input is one run of
// an agent, or stops one. Lines of the output say which kinds of events have come, and at last what has become of it.
import { createInterface } from "node:readline";

const { HttpAgent } = await import(process.argv[2]);
console.log = console.error; // the client's remarks
const agents = {};
const tell = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);

async function ask({ id, name, url, key, threadId, message, parameters }) {
  const agent = (agents[name] ??= new HttpAgent({ url, threadId, headers: { Authorization: `Bearer ${key}` } }));
  if (message) agent.addMessage({ id: crypto.randomUUID(), ...message });
  const seen = new Set();
  let end;
  let error;
  const onEvent = ({ event }) => {
    const kind = event.type === "CUSTOM" ? event.name : event.type;
    if (!seen.has(kind)) tell({ id, seen: kind });
    seen.add(kind);
    if (event.type === "RUN_FINISHED" || event.type === "RUN_ERROR") end = event;
  };
  await agent.runAgent(parameters, { onEvent }).catch((failure) => {
    error = `${failure.message} ${JSON.stringify(failure.payload ?? "")}`;
  });
  tell({ id, end, error, messages: agent.messages });
}

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  if (request.stops) agents[request.stops].abortRun();
  else void ask(request);
}
process.exit(0);
