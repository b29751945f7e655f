import type { VNode } from "preact";
import { useState } from "preact/hooks";

/** Copies a text and confirms it briefly. */
export function CopyButton({ text, name = "Copy", shown = "Copy" }: { text: string; name?: string; shown?: string }): VNode {
  const [done, setDone] = useState("");
  const copy = (): void => {
    const say = (word: string): void => {
      setDone(word);
      setTimeout(() => setDone(""), 2000);
    };
    // Without TLS, browsers provide the clipboard only on localhost.
    if (!navigator.clipboard) return say("Copying needs HTTPS");
    navigator.clipboard.writeText(text).then(() => say("Copied"), () => say("Could not copy"));
  };
  return <button type="button" class="plain small" aria-label={done || name} onClick={copy}><span aria-live="polite">{done || shown}</span></button>;
}

/** A line of text or a command, with a button that copies it. */
export function Copied({ text, name }: { text: string; name: string }): VNode {
  return <div class="copied"><code tabIndex={0}>{text}</code><CopyButton text={text} name={name} /></div>;
}
