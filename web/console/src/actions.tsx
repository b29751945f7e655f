/** Action buttons of an item. Destructive actions, and those that need input, are confirmed first. */

import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { attempt, may } from "./state";

/**
 * An action on an item. `bad` and `ask` require a confirmation; a returned text is shown. With `inRows`, the list has a
 * button for it in each row, which needs no confirmation.
 */
export interface Action<T> {
  name: string;
  method: string;
  when?: (item: T) => boolean;
  bad?: boolean;
  ask?: string;
  inRows?: true;
  run: (item: T, text: string) => Promise<unknown>;
}

/** The buttons of an item in a list. */
export function RowActions<T>({ all, item, name, onDone }: { all: Action<T>[]; item: T; name: string; onDone: () => void }): VNode {
  const some = all.filter(({ method, when, inRows }) => inRows && may(method) && (when?.(item) ?? true));
  return (
    <span class="buttons">
      {some.map((action) => (
        <button
          key={action.name}
          class={`second ${action.bad ? "bad" : ""}`}
          aria-label={`${action.name} ${name}`}
          onClick={() => void attempt(async () => (await action.run(item, ""), onDone()))}
        >
          {action.name}
        </button>
      ))}
    </span>
  );
}

export function Actions<T>({ all, item, onDone, gone }: { all: Action<T>[]; item: T; onDone: () => Promise<void> | void; gone?: () => void }): VNode | null {
  const [open, setOpen] = useState<Action<T>>();
  const [text, setText] = useState("");
  const [message, setMessage] = useState("");
  const some = all.filter(({ method, when }) => may(method) && (when?.(item) ?? true));
  const act = (action: Action<T>, given = ""): void =>
    void attempt(async () => {
      const answer = await action.run(item, given);
      setOpen(undefined);
      setText("");
      setMessage(typeof answer === "string" ? answer : "");
      if (answer === GONE && gone) gone();
      else await onDone();
    });
  if (!some.length && !message) return null;
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
            // The state may lack what was typed since the last frame.
            act(open, event.currentTarget.querySelector("input")?.value);
          }}
        >
          {open.ask && <input aria-label={open.ask} placeholder={open.ask} value={text} ref={focus} onInput={(event) => setText(event.currentTarget.value)} />}
          <button class={open.bad ? "bad" : ""} ref={open.ask ? null : focus}>{open.bad ? `Yes, ${open.name.toLowerCase()}` : open.name}</button>
          <button type="button" class="second" onClick={() => setOpen(undefined)}>
            Cancel
          </button>
        </form>
      )}
      {message && message !== GONE && <p class="card" role="status">{message}</p>}
    </>
  );
}

function focus(element: HTMLElement | null): void {
  element?.focus();
}

/** Returned by an action that removed its item. */
export const GONE = "\u0000gone";
