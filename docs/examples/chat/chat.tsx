import { type CallDecisionJson, type CallJson, decode, encode, Pawl, requestId, type RunView } from "@pawl/client";
import { type ReactNode, useActionState, useEffect, useState } from "react";
import { createRoot } from "react-dom/client";

const pawl = new Pawl();
// A browser opens six connections for all windows together, so a hidden window closes its stream.
document.addEventListener("visibilitychange", () => (document.hidden ? pawl.streams.pause() : pawl.streams.resume()));

/** Conversation key: reloads and other windows find the conversation by it. */
const CHAT = "example-chat";

/** Front-end tools: definitions and functions. */
const PAINT = {
  name: "paint",
  description: "Paints the background of the page in a colour of CSS.",
  argumentsSchemaJson: encode({ type: "object", properties: { colour: { type: "string" } }, required: ["colour"] }),
  category: "TOOL_CATEGORY_SAFE",
  effectClass: "EFFECT_CLASS_IDEMPOTENT",
} as const;
const TOOLS = {
  paint: ({ colour }: { colour: string }) => {
    if (!CSS.supports("color", colour)) throw new Error(`${colour} is no colour.`);
    document.body.style.background = colour;
    return `The page is ${colour} now.`;
  },
};

type Asked = { runId: string; text: string };

/** Returns the live state of a run. */
function useRun(runId: string): RunView | undefined {
  const [view, setView] = useState<RunView>();
  useEffect(() => pawl.watchRun(runId, (now) => setView(now)), [runId]);
  return view;
}

/** Returns the user's messages in this chat. */
async function history(): Promise<Asked[]> {
  const { conversation } = await pawl.conversations.getConversation({ conversationKey: CHAT });
  const asked: Asked[] = [];
  for (let pageToken = ""; ; ) {
    const page = await pawl.agent.listMessages({ conversationId: conversation!.conversationId!, pageToken });
    for (const { role, runId = "", text = "" } of page.messages ?? []) if (role === "ROLE_USER") asked.push({ runId, text });
    if (!(pageToken = page.nextPageToken ?? "")) return asked;
  }
}

function Chat(): ReactNode {
  const [turns, setTurns] = useState<Asked[]>();
  useEffect(() => void history().then(setTurns, () => setTurns([])), []); // There is none before the first message.
  const send = async (text: string): Promise<void> => {
    const { run } = await pawl.agent.startRun({ requestId: requestId(), conversationKey: CHAT, text, frontEndTools: [PAINT] });
    setTurns((all = []) => [...all, { runId: run!.runId!, text }]);
  };
  if (!turns) return null;
  return (
    <>
      {turns.map((turn) => <Turn key={turn.runId} {...turn} />)}
      <Ask label="Your message" button="Send" say={send} />
    </>
  );
}

function Turn({ runId, text }: Asked): ReactNode {
  const view = useRun(runId);
  useEffect(() => {
    for (const call of Object.values(view?.calls ?? {}))
      if (call.state === "CALL_STATE_OFFERED") pawl.answer(call, TOOLS).catch(console.error); // Once, in one window.
  }, [view]);
  return (
    <section data-state={view?.run.state}>
      <p className="asked">{text}</p>
      {view?.rounds.map((round) => (
        <div key={round.round}>
          <p className="said">{round.text}</p>
          {round.callIds.map((id) => (
            <Card key={id} call={view.calls[id]!} progress={view.progress[id]?.message} />
          ))}
        </div>
      ))}
      {view?.gap && <p className="said">{view.run.outputText}</p>}
      {view?.run.failure && <p role="alert">{view.run.failure.message}</p>}
      {view && !view.ended && (
        <button onClick={() => pawl.agent.cancelRun({ requestId: requestId(), runId }).catch(console.error)}>Stop</button>
      )}
    </section>
  );
}

/** A tool call: its state, and buttons to approve or answer it. */
function Card({ call, progress }: { call: CallJson; progress: string | undefined }): ReactNode {
  const { runId = "", callId = "", state, approval, question } = call;
  const decide = (decision: CallDecisionJson): Promise<unknown> =>
    pawl.agent.decide({ requestId: requestId(), runId, decision: { callId, digest: approval?.digest ?? "", ...decision } });
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
  return known ? <Chat /> : <Ask label="Your key" button="Log in" type="password" say={logIn} />;
}

createRoot(document.getElementById("chat")!).render(<App />);
