// A front end on a published client of AG-UI, which knows nothing of Pawl: drive.mjs PACKAGE URL KEY
const [name, url, key] = process.argv.slice(2);
const { HttpAgent } = await import(name);
console.log = console.error; // the client's remarks
const begin = (threadId) => new HttpAgent({ url, threadId: `${name}-${threadId}`, headers: { Authorization: `Bearer ${key}` } });
const said = (agent) => agent.messages.map((each) => [each.role, each.content ?? ""]);

/** Runs an agent, with a message more if there is a text, and returns the event with which the run ended. */
async function ask(agent, text, parameters = {}) {
  if (text) agent.addMessage({ id: crypto.randomUUID(), role: "user", content: text });
  let end;
  await agent.runAgent(parameters, {
    onRunFinishedEvent: ({ event }) => void (end = event),
    onRunErrorEvent: ({ event }) => void (end = event),
  });
  return end;
}

const told = {};
const sum = begin("sum");
await ask(sum, "what is 17 * 23");
told.sum = said(sum);
const reload = begin("sum");
await ask(reload);
told.reload = said(reload);

const mail = begin("mail");
const { outcome } = await ask(mail, "e-mail ann@example.com about lunch: see you at noon");
told.interrupt = outcome.interrupts[0].reason;
const stranger = begin("mail");
told.refused = await ask(stranger, "and then?").then(
  () => "",
  (error) => String(error.message) + JSON.stringify(error.payload ?? ""),
);
told.refused = told.refused.includes("CONVERSATION_BUSY") ? "CONVERSATION_BUSY" : told.refused;
await ask(mail, "", {
  resume: [{ interruptId: outcome.interrupts[0].id, status: "resolved", payload: { approved: true } }],
});
told.mail = said(mail);

const tools = [{ name: "show_plan", description: "Shows the plan.", parameters: { type: "object", properties: {} } }];
const page = begin("page");
await ask(page, "show me the plan", { tools });
const call = page.messages.at(-1).toolCalls[0];
told.tool = call.function.name;
page.addMessage({ id: crypto.randomUUID(), role: "tool", toolCallId: call.id, content: '"it is shown"' });
await ask(page, "", { tools });
told.shown = said(page);
process.stdout.write(JSON.stringify(told));
process.exit(0);
