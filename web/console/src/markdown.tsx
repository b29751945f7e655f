/** Formatted texts. The parser is loaded when the first text is shown; until then, texts are plain. */

import { signal } from "@preact/signals";
import type { ComponentChildren, FunctionComponent, VNode } from "preact";
import { useEffect, useErrorBoundary, useState } from "preact/hooks";

import { visible } from "./visible";

/** Shows `children`, or `text` if they fail to render. A new text is tried again. */
export function Boundary({ text = "", children }: { text?: string; children: ComponentChildren }): VNode {
  const [failed, setFailed] = useState<{ text: string; message: string }>();
  useErrorBoundary((error) => {
    console.error(error);
    setFailed({ text, message: error instanceof Error ? error.message : String(error) });
  });
  if (failed?.text !== text) return <>{children}</>;
  return (
    <div class="card bad">
      <p class="quiet">The formatted view failed{text ? ". This is the plain text:" : `: ${visible(failed.message)}`}</p>
      {text && <pre class="preview">{visible(text)}</pre>}
    </div>
  );
}

/** Returns a component that falls back to plain text if `View` fails to render. */
export function bounded<P extends object>(View: FunctionComponent<P>, textOf: (props: P) => string): FunctionComponent<P> {
  return (props) => <Boundary text={textOf(props)}><View {...props} /></Boundary>;
}

/** A formatted text; `busy` while it grows. */
export const Markdown = bounded(Formatted, ({ text }: { text: string; busy?: boolean }) => text);

const rich = signal<typeof import("./rich").Rich | undefined>(undefined);
let loading: Promise<void> | undefined;

/** Loads the parser ahead of the first text. */
export function loadRich(): void {
  loading ??= import("./rich").then((found) => void (rich.value = found.Rich), () => (loading = undefined));
}

function Formatted({ text, busy = false }: { text: string; busy?: boolean }): VNode {
  useEffect(loadRich, []);
  if (rich.value) return <rich.value text={text} busy={busy} />;
  return <div class="markdown"><pre class="preview">{visible(text)}</pre></div>;
}
