import { type CallDecisionJson, type CallJson, decode, encode, Pawl, type Turn } from "@pawl/client";
import { type Chat, useConversation, useJobs } from "@pawl/client/react";
import { type ReactNode, useActionState, useEffect, useState } from "react";
import { createRoot } from "react-dom/client";

const pawl = new Pawl();
// A browser opens six connections for all windows together, so a hidden window closes its stream.
document.addEventListener("visibilitychange", () => (document.hidden ? pawl.streams.pause() : pawl.streams.resume()));

/** Conversation key: reloads and other windows find the conversation by it. */
const CHAT = { conversationKey: "example-chat" };

/** Front-end tools: definitions and functions. */
const PAINT = {
  name: "paint",
  description: "Paints the background of the page in a CSS color.",
  argumentsSchemaJson: encode({ type: "object", properties: { color: { type: "string" } }, required: ["color"] }),
  category: "TOOL_CATEGORY_SAFE",
  effectClass: "EFFECT_CLASS_IDEMPOTENT",
} as const;
const TOOLS = {
  paint: ({ color }: { color: string }) => {
    if (!CSS.supports("color", color)) throw new Error(`${color} is not a CSS color.`);
    document.body.style.background = color;
    return `The page is now ${color}.`;
  },
};

function Conversation(): ReactNode {
  const chat = useConversation(pawl, CHAT, TOOLS);
  const jobs = useJobs(pawl, CHAT);
  const elsewhere = chat.pendingCalls.filter(({ runId }) => !chat.turns.some(({ run }) => run.runId === runId));
  if (chat.error) return <p role="alert">{chat.error.message}</p>;
  if (!chat.caughtUp) return null;
  return (
    <>
      {chat.turns.map((turn) => <Section key={turn.run.runId} turn={turn} chat={chat} />)}
      {elsewhere.map((call) => <Card key={call.callId} call={call} chat={chat} />)}
      {jobs.filter(({ endTime }) => !endTime).map((job) => (
        <p key={job.jobId} role="status">
          {job.definition?.toolName} is running in the background. <button onClick={() => job.stop().catch(console.error)}>Stop it</button>
        </p>
      ))}
      <Ask label="Your message" button="Send" say={(text) => chat.send(text, { frontEndTools: [PAINT] })} />
    </>
  );
}

/** A turn. A message or a background job started it. */
function Section({ turn: { run, log, asked, answers, notice }, chat }: { turn: Turn; chat: Chat }): ReactNode {
  return (
    <section data-state={run.state}>
      <p className={notice ? "notice" : "asked"}>{asked}</p>
      {log.rounds.map((round) => (
        <div key={round.round}>
          <p className="said">{round.text}</p>
          {round.callIds.map((id) => (
            <Card key={id} call={log.calls[id]!} chat={chat} progress={log.progress[id]?.message} />
          ))}
        </div>
      ))}
      {!log.rounds.length && answers.map((text, index) => <p key={index} className="said">{text}</p>)}
      {run.failure && <p role="alert">{run.failure.message}</p>}
      {run.runId === chat.active?.run.runId && <button onClick={() => chat.stop().catch(console.error)}>Stop</button>}
    </section>
  );
}

/** A tool call: its state, and buttons to approve or answer it. */
function Card({ call, chat, progress }: { call: CallJson; chat: Chat; progress?: string | undefined }): ReactNode {
  const { state, approval, question } = call;
  const decide = (decision: CallDecisionJson): Promise<void> => chat.decide(call, decision);
  return (
    <article data-state={state}>
      <b>{call.toolName}</b> {state?.replace("CALL_STATE_", "").toLowerCase().replaceAll("_", " ")} {progress}
      <pre>{JSON.stringify(decode(call.argumentsJson))}</pre>
      {call.result?.contentJson && <pre>{JSON.stringify(decode(call.result.contentJson))}</pre>}
      {state === "CALL_STATE_AWAITING_APPROVAL" && (
        <>
          <p>{approval?.preview}</p>
          <button onClick={() => decide({ kind: "DECISION_KIND_APPROVE" }).catch(console.error)}>Approve</button>
          <Ask label="Why not" button="Reject" say={(reason) => decide({ kind: "DECISION_KIND_REJECT", reason })} />
        </>
      )}
      {state === "CALL_STATE_ASKED" && (
        <>
          <p>{question?.question} {question?.options?.join(", ")}</p>
          <Ask label="Your answer" button="Answer" say={(answer) => decide({ kind: "DECISION_KIND_ANSWER", answer })} />
        </>
      )}
    </article>
  );
}

/** A field with a button. On an error it shows the message and keeps the text. */
function Ask(props: { label: string; button: string; type?: string; say: (text: string) => Promise<unknown> }): ReactNode {
  const [[fault, text], act, busy] = useActionState(
    async (_: [string, string], data: FormData): Promise<[string, string]> => {
      const text = String(data.get("text"));
      return props.say(text).then(() => ["", ""], (error: Error) => [error.message, text]);
    },
    ["", ""],
  );
  return (
    <form action={act}>
      <input name="text" required type={props.type} aria-label={props.label} placeholder={props.label} defaultValue={text} />
      <button disabled={busy}>{props.button}</button>
      {fault && <p role="alert">{fault}</p>}
    </form>
  );
}

function App(): ReactNode {
  const [known, setKnown] = useState<boolean>();
  useEffect(() => void pawl.agent.whoAmI().then(() => setKnown(true), () => setKnown(false)), []);
  if (known === undefined) return null;
  const logIn = (key: string): Promise<void> => pawl.logIn({ key }).then(() => setKnown(true));
  return known ? <Conversation /> : <Ask label="Your key" button="Log in" type="password" say={logIn} />;
}

createRoot(document.getElementById("chat")!).render(<App />);
