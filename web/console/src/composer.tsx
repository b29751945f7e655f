/** The message editor, with files, images and a button that stops the run. */

import { type PartJson, requestId, type RunView } from "@pawl/client";
import type { ComponentChildren, VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { type Attachment, attachmentOf, mayAttach, partsOf } from "./attachments";
import { Icon } from "./design/icons";
import { attempt, draft, keep, kept, may, pawl } from "./state";
import { visible } from "./visible";

export type Policy = "MESSAGE_POLICY_QUEUE" | "MESSAGE_POLICY_STEER";

interface ComposerProps {
  takesFocus: boolean;
  conversationId: string;
  agent: string;
  active: RunView | undefined;
  children: ComponentChildren;
  onSend: (text: string, policy: Policy, parts: PartJson[]) => Promise<boolean>;
}

export function Composer({ takesFocus, conversationId, agent, active, onSend, children }: ComposerProps): VNode {
  const field = useRef<HTMLTextAreaElement>(null);
  const picker = useRef<HTMLInputElement>(null);
  const [busy, setBusy] = useState(false);
  const [steer, setSteer] = useState(false);
  const [attached, setAttached] = useState<Attachment[]>([]);
  const [isOver, setOver] = useState(false);
  useEffect(() => {
    if (!field.current) return;
    if (draft.value) keep(conversationId, draft.value);
    draft.value = "";
    field.current.value = kept(conversationId);
    if (takesFocus) field.current.focus();
  }, [draft.value]);
  const attach = async (files: Iterable<File>): Promise<void> => {
    const found = await attempt(() => Promise.all([...files].map(attachmentOf)));
    if (found) setAttached((all) => [...all, ...found]);
    field.current?.focus();
  };
  const send = async (): Promise<void> => {
    const text = field.current?.value.trim() ?? "";
    if ((!text && !attached.length) || busy || !field.current) return;
    setBusy(true);
    const parts = await attempt(() => partsOf(attached));
    const sent = !!parts && (await onSend(text, active && steer && !parts.length ? "MESSAGE_POLICY_STEER" : "MESSAGE_POLICY_QUEUE", parts));
    setBusy(false);
    if (sent) keep(conversationId, "");
    if (!field.current) return; // The new conversation has opened its own page.
    if (sent) {
      field.current.value = "";
      setAttached([]);
    }
    field.current.focus();
  };
  if (!may("agent.v1.AgentService/StartRun")) return <p class="strip">You have read-only access.</p>;
  const mayFiles = mayAttach();
  const take = (event: Event, from: DataTransfer | null): void => {
    if (!mayFiles || !from?.files.length) return;
    event.preventDefault();
    void attach(from.files);
  };
  return (
    <form
      class={`composer ${isOver ? "over" : ""}`}
      onSubmit={(event) => (event.preventDefault(), void send())}
      onDragOver={(event) => event.dataTransfer?.types.includes("Files") && (event.preventDefault(), setOver(mayFiles))}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => (setOver(false), take(event, event.dataTransfer))}
    >
      {attached.length > 0 && (
        <div class="parts">
          {attached.map(({ name, picture }, index) => (
            <span key={index} class="chip">
              {picture ? <img src={picture} alt="" /> : <Icon name="documents" />}
              {visible(name)}
              <button type="button" class="icon" aria-label={`Remove ${visible(name)}`} onClick={() => setAttached(attached.filter((_, key) => key !== index))}>
                <Icon name="close" />
              </button>
            </span>
          ))}
        </div>
      )}
      <textarea
        ref={field}
        data-first
        rows={1}
        aria-label="Your message"
        placeholder={`Message ${agent}`}
        onInput={(event) => keep(conversationId, event.currentTarget.value)}
        onPaste={(event) => take(event, event.clipboardData)}
        onKeyDown={(event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && (event.preventDefault(), void send())}
      />
      <div class="buttons">
        {mayFiles && (
          <>
            <input ref={picker} type="file" multiple hidden aria-label="Files" onChange={({ currentTarget }) => (void attach(currentTarget.files ?? []), (currentTarget.value = ""))} />
            <button type="button" class="icon" aria-label="Attach files" title="Attach files. You can also drop or paste them." onClick={() => picker.current?.click()}>
              <Icon name="attach" />
            </button>
          </>
        )}
        {children}
        {active && <label class="row quiet"><input type="checkbox" checked={steer} onChange={(event) => setSteer(event.currentTarget.checked)} /> Steer the current run</label>}
        <span class="space" />
        {active && (
          <button type="button" class="second bad" onClick={() => void attempt(() => pawl.agent.cancelRun({ requestId: requestId(), runId: active.run.runId ?? "" }))}>
            <Icon name="stop" /> Stop
          </button>
        )}
        <button disabled={busy}>Send</button>
      </div>
    </form>
  );
}
