/** Buttons that do something with an item; what cannot be taken back, or needs a word, is asked about first. */

import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { attempt, may } from "./state";

/** Something to do with an item. What is `bad` or asks for something is confirmed first; a text that it returns is shown. */
export interface Action<T> {
  name: string;
  method: string;
  when?: (item: T) => boolean;
  bad?: boolean;
  ask?: string;
  run: (item: T, said: string) => Promise<unknown>;
}

export function Actions<T>({ all, item, onDone, gone }: { all: Action<T>[]; item: T; onDone: () => Promise<void> | void; gone?: () => void }): VNode | null {
  const [open, setOpen] = useState<Action<T>>();
  const [said, setSaid] = useState("");
  const [told, setTold] = useState("");
  const some = all.filter(({ method, when }) => may(method) && (when?.(item) ?? true));
  const act = (action: Action<T>): void =>
    void attempt(async () => {
      const answer = await action.run(item, said);
      setOpen(undefined);
      setSaid("");
      setTold(typeof answer === "string" ? answer : "");
      if (answer === GONE && gone) gone();
      else await onDone();
    });
  if (!some.length && !told) return null;
  return (
    <>
      <p class="buttons">
        {some.map((action) => (
          <button
            key={action.name}
            class={`second ${action.bad ? "bad" : ""}`}
            aria-expanded={action.bad || action.ask ? open?.name === action.name : undefined}
            onClick={() => (action.bad || action.ask ? setOpen(open?.name === action.name ? undefined : action) : act(action))}
          >
            {action.name}
          </button>
        ))}
      </p>
      {open && (
        <form
          class="card row"
          onSubmit={(event) => {
            event.preventDefault();
            act(open);
          }}
        >
          {open.ask && <input aria-label={open.ask} placeholder={open.ask} value={said} ref={focus} onInput={(event) => setSaid(event.currentTarget.value)} />}
          <button class={open.bad ? "bad" : ""} ref={open.ask ? null : focus}>{open.bad ? `${open.name} for good` : open.name}</button>
          <button type="button" class="second" onClick={() => setOpen(undefined)}>
            Leave it
          </button>
        </form>
      )}
      {told && told !== GONE && <p class="card" role="status">{told}</p>}
    </>
  );
}

function focus(element: HTMLElement | null): void {
  element?.focus();
}

/** What an action returns whose item is there no more. */
export const GONE = "\u0000gone";
