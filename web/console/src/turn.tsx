/** A message with the log of its run, and the actions on both. */

import { type ConversationJson, isEnded, type PartJson, type Turn } from "@pawl/client";
import { Component, type VNode } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { pictures } from "./attachments";
import { fork } from "./conversations";
import { CopyButton } from "./copy";
import { Icon, type IconName } from "./design/icons";
import { Markdown } from "./markdown";
import { word } from "./state";
import { RunLog } from "./view";
import { visible } from "./visible";

export type TurnProps = Turn & {
  conversation: ConversationJson;
  /** Number of the last message before the turn. */
  before: number;
  /** A message on its way into the run. */
  pending: string | undefined;
  mayFork: boolean;
  onResend: (number: number, text: string, parts: PartJson[]) => Promise<boolean>;
};

/** Only turns that have changed are drawn again. */
export class TurnView extends Component<TurnProps> {
  override shouldComponentUpdate(next: TurnProps): boolean {
    const isSame = (one: unknown, other: unknown): boolean =>
      typeof one === "function" || (Array.isArray(one) && Array.isArray(other) ? one.length === other.length && one.every((each, index) => each === other[index]) : one === other);
    return !Object.entries(next).every(([name, value]) => isSame(value, this.props[name as keyof TurnProps]));
  }

  override render(props: TurnProps): VNode {
    return <Whole {...props} resend={(text) => this.props.onResend(this.props.before, text, this.props.parts)} />;
  }
}

function Whole({ run, log, known, asked, parts, answers, notice, last, conversation, before, pending, mayFork, resend }: TurnProps & { resend: (text: string) => Promise<boolean> }): VNode {
  const [editing, setEditing] = useState(false);
  const [busy, setBusy] = useState(false);
  const { conversationId = "" } = conversation;
  const mayChange = isEnded(run) && !!asked && !notice && mayFork && !parts.some(({ image }) => image);
  const tokens = Number(log.run.usage?.inputTokens ?? 0) + Number(log.run.usage?.outputTokens ?? 0);
  const text = known && log.rounds.length ? log.rounds.map((round) => round.text).filter(Boolean).join("\n\n") : answers.join("\n\n");
  const again = async (to: string): Promise<void> => {
    setBusy(true);
    if (await resend(to)) setEditing(false);
    setBusy(false);
  };
  return (
    <div class="turn" data-run={run.runId} data-state={word(run.state)}>
      {editing && <Editor text={asked} busy={busy} onSend={again} onClose={() => setEditing(false)} />}
      {asked && !notice && !editing && (
        <>
          <Parts all={parts} />
          <div class="mine">{visible(asked)}</div>
          <p class="deeds mine-deeds">
            <CopyButton text={asked} name="Copy message" />
            {mayChange && <Deed icon="edit" name="Edit message" disabled={busy} onClick={() => setEditing(true)} />}
          </p>
        </>
      )}
      {notice && <p class="quiet">↩ {visible(asked.replace(/ \(run_\w+\)$/gm, "") || "background update")}</p>}
      {known ? <RunLog view={log} answers={answers} /> : answers.map((each, key) => <Markdown key={key} text={each} />)}
      {pending && <div class="mine">{visible(pending)} <small class="quiet">(sending)</small></div>}
      <p class="deeds">
        {isEnded(run) && text && <CopyButton text={text} name="Copy answer" />}
        {mayChange && <Deed icon="again" name="Regenerate" disabled={busy} onClick={() => void again(asked)} />}
        {isEnded(run) && last > 0 && mayFork && <Deed icon="workflows" name="Fork from here" onClick={() => void fork(conversationId, last)} />}
        {known && <a href={`/c/${conversationId}?run=${run.runId}`}>Details</a>}
        {tokens > 0 && <span class="quiet num">{tokens.toLocaleString("en")} tokens</span>}
      </p>
    </div>
  );
}

function Deed({ icon, name, disabled = false, onClick }: { icon: IconName; name: string; disabled?: boolean; onClick: () => void }): VNode {
  return <button type="button" class="icon" aria-label={name} title={name} disabled={disabled} onClick={onClick}><Icon name={icon} /></button>;
}

/** Edits a sent message. The model then answers again, in a new version of the conversation. */
function Editor({ text, busy, onSend, onClose }: { text: string; busy: boolean; onSend: (text: string) => void; onClose: () => void }): VNode {
  const field = useRef<HTMLTextAreaElement>(null);
  useEffect(() => field.current?.focus(), []);
  return (
    <form class="editor" onSubmit={(event) => (event.preventDefault(), field.current?.value.trim() && onSend(field.current.value.trim()))}>
      <textarea ref={field} rows={3} aria-label="Edited message" defaultValue={text} onKeyDown={(event) => event.key === "Escape" && onClose()} />
      <div class="buttons">
        <span class="quiet">The earlier version is kept.</span>
        <button type="button" class="second" onClick={onClose}>Cancel</button>
        <button disabled={busy}>Send again</button>
      </div>
    </form>
  );
}

/** The images and documents of a message. An image that another window sent is only named. */
function Parts({ all }: { all: PartJson[] }): VNode | null {
  const shown = all.filter(({ image, file }) => image ?? file);
  if (!shown.length) return null;
  return (
    <div class="parts">
      {shown.map(({ image, file }, key) => {
        const url = image?.data ? `data:${image.mediaType};base64,${image.data}` : pictures.value[image?.sha256 ?? ""];
        if (url) return <img key={key} src={url} alt="Attached image" />;
        return (
          <span key={key} class="chip">
            <Icon name={image ? "attach" : "documents"} />
            {image ? `Image, ${Math.ceil(Number(image.sizeBytes ?? 0) / 1024)} KB` : visible((file?.documentName ?? "").replace(/^uploads\/\S+ /, ""))}
          </span>
        );
      })}
    </div>
  );
}
