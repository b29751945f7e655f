import "@copilotkit/react-core/v2/styles.css";
import { CopilotChat, CopilotKitProvider, useAgent, useCopilotKit, useFrontendTool, useHumanInTheLoop, useInterrupt } from "@copilotkit/react-core/v2";
import { useEffect, useRef, useState } from "react";
import { createRoot } from "react-dom/client";
import { z } from "zod";

interface Asked {
  id: string;
  reason: string;
  message?: string;
}

// The run continues when every interrupt has an answer; CopilotKit sends all answers together.
function Ask({ asked, resolve }: { asked: Asked; resolve: (payload: object, interruptId: string) => unknown }) {
  const [text, setText] = useState("");
  const [isAnswered, setAnswered] = useState(false);
  const answer = (payload: object) => {
    setAnswered(true);
    resolve(payload, asked.id);
  };
  if (asked.reason === "tool_call")
    return (
      <fieldset aria-label="Approval" disabled={isAnswered}>
        <p>{asked.message}</p>
        <button onClick={() => answer({ approved: true })}>Approve</button>{" "}
        <button onClick={() => answer({ approved: false, reason: "Not now." })}>Reject</button>
      </fieldset>
    );
  return (
    <fieldset aria-label="Question" disabled={isAnswered}>
      <label>
        {asked.message} <input value={text} onChange={(event) => setText(event.target.value)} />
      </label>{" "}
      <button onClick={() => answer(asked.reason === "pawl:budget" ? { tokens: Number(text) } : { answer: text })}>Answer</button>
    </fieldset>
  );
}

const threadId = new URLSearchParams(location.search).get("thread") ?? "copilotkit";

// A background job. `useTurns` keeps it current.
const job = z.object({
  jobId: z.string(),
  state: z.string(),
  definition: z.object({ toolName: z.string() }),
  progress: z.object({ fraction: z.number().optional(), message: z.string().optional() }).optional(),
  notStopped: z.string().optional(),
  endTime: z.string().nullish(),
});
function Job({ content }: { content: z.infer<typeof job> }) {
  const [stopped, setStopped] = useState<z.infer<typeof job>>();
  const { jobId, state, definition, progress, notStopped, endTime } = content.endTime ? content : (stopped ?? content);
  const stop = async () => {
    const body = JSON.stringify({ threadId, runId: jobId });
    setStopped((await (await fetch("/stop", { method: "POST", headers: { "Content-Type": "application/json" }, body })).json()).job);
  };
  return (
    <fieldset aria-label="Background job">
      <p>
        {definition.toolName}: {notStopped || state.replace("RUN_STATE_", "").toLowerCase()} {progress?.message}
      </p>
      {!endTime && state !== "RUN_STATE_CANCELLING" && <button onClick={() => void stop()}>Stop</button>}
    </fieldset>
  );
}
const activities = [{ activityType: "pawl.job", content: job, render: Job }];

// Opens a stream of the thread's turns and jobs.
function stream(threadId: string, onEvent: (event: any) => void) {
  const turns = new EventSource(`/turns?thread=${encodeURIComponent(threadId)}`);
  turns.onmessage = ({ data }) => onEvent(JSON.parse(data));
  return () => turns.close();
}

// Shows a job's progress. Returns whether the thread has a turn or an answer that the page does not show.
function isNews(agent: ReturnType<typeof useAgent>["agent"], { type, name, messageId, content, messages = [] }: any) {
  const isJob = ({ id }) => type === "ACTIVITY_SNAPSHOT" && id === messageId;
  if (agent.messages.some(isJob)) agent.setMessages(agent.messages.map((shown) => (isJob(shown) ? { ...shown, content } : shown)));
  const isShown = ({ id, content }) => agent.messages.some((shown) => shown.id === id && shown.content === content);
  return name === "pawl.run" || messages.some((message) => message.role === "assistant" && message.content && !isShown(message));
}

// Background work makes progress and starts turns when no run is open. A stream beside CopilotKit's reports both. It also
// shows when the gateway can be reached again after CopilotKit's own stream broke.
function useTurns(threadId: string) {
  const { agent } = useAgent();
  const { copilotkit } = useCopilotKit();
  const isBroken = useRef(false);
  useEffect(() => copilotkit.subscribe({ onError: () => void (isBroken.current = true) }).unsubscribe, [copilotkit]);
  useEffect(() => {
    if (agent.isRunning) return;
    return stream(threadId, (event) => {
      if (agent.isRunning || !(isNews(agent, event) || isBroken.current)) return;
      isBroken.current = false;
      void copilotkit.connectAgent({ agent });
    });
  }, [agent, agent.isRunning, threadId]);
}

function Page() {
  useTurns(threadId);
  const [color, setColor] = useState("white");
  useFrontendTool({
    name: "paint",
    description: "Paints the page in a CSS color.",
    parameters: z.object({ color: z.string() }),
    handler: async ({ color }) => {
      setColor(color);
      return `The page is ${color}.`;
    },
  });
  useHumanInTheLoop({
    name: "choose",
    description: "Lets the user choose one of several options.",
    parameters: z.object({ options: z.array(z.string()) }),
    render: ({ args, respond }) => (
      <p>{respond && args.options?.map((option) => <button key={option} onClick={() => respond(option)}>{option}</button>)}</p>
    ),
  });
  useInterrupt({
    render: ({ interrupts, resolve }) => <>{interrupts.map((each) => <Ask key={each.id} asked={each} resolve={resolve} />)}</>,
  });
  return (
    <main style={{ background: color, height: "100vh" }}>
      <CopilotChat threadId={threadId} />
    </main>
  );
}

document.body.append(document.createElement("div"));
createRoot(document.body.firstElementChild!).render(
  <CopilotKitProvider runtimeUrl="/copilotkit" renderActivityMessages={activities} showDevConsole={false}>
    <Page />
  </CopilotKitProvider>,
);
