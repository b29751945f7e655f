/** Action buttons of an item. Destructive actions, and those that need input, are confirmed first. */

import { Fragment, type VNode } from "preact";
import { useState } from "preact/hooks";

import { Dialog, Menu } from "./design/parts";
import { attempt, may } from "./state";

/**
 * An action on an item. `bad` and `ask` require a confirmation; a returned text is shown. With `inRows`, the list has a
 * button for it in each row, which needs no confirmation. With `more`, it is in a menu; `main` is the main one of the page.
 */
export interface Action<T> {
  name: string;
  method: string;
  when?: (item: T) => boolean;
  bad?: boolean;
  ask?: string;
  inRows?: true;
  more?: true;
  main?: true;
  /** What follows from it, shown beside the button. */
  hint?: string;
  run: (item: T, text: string) => Promise<unknown>;
}

export function RowActions<T>({ all, item, name, onDone }: { all: Action<T>[]; item: T; name: string; onDone: () => void }): VNode {
  const some = all.filter(({ method, when, inRows }) => inRows && may(method) && (when?.(item) ?? true));
  return (
    <span class="buttons">
      {some.map((action) => (
        <button
          key={action.name}
          class={`second small ${action.bad ? "bad" : ""}`}
          aria-label={`${action.name} ${name}`}
          onClick={() => void attempt(async () => (await action.run(item, ""), onDone()))}
        >
          {action.name}
        </button>
      ))}
    </span>
  );
}

export function Actions<T>({ all, item, onDone, gone, menu = "More actions" }: { all: Action<T>[]; item: T; onDone: () => Promise<void> | void; gone?: () => void; menu?: string }): VNode | null {
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
  const [rare, usual] = [true, false].map((more) => some.filter((action) => !!action.more === more));
  const button = (action: Action<T>): VNode => (
    <Fragment key={action.name}>
      <button type="button" class={`${action.main ? "" : "second"} ${action.bad ? "bad" : ""}`} onClick={() => (action.bad || action.ask ? setOpen(action) : act(action))}>{action.name}</button>
      {action.hint && <span class="quiet">{action.hint}</span>}
    </Fragment>
  );
  return (
    <>
      {!!some.length && (
        <div class={some[0]?.hint ? "choices" : "buttons"}>
          {usual?.map(button)}
          {!!rare?.length && <Menu name={menu}>{rare.map(button)}</Menu>}
        </div>
      )}
      {open && (
        <Dialog title={open.bad ? `${open.name}?` : open.name} onClose={() => setOpen(undefined)}>
          <form onSubmit={(event) => (event.preventDefault(), act(open, text))}>
            {open.ask && (
              <label>
                {open.ask}
                <input value={text} ref={focus} onInput={(event) => setText(event.currentTarget.value)} />
              </label>
            )}
            <p class="buttons">
              <button class={open.bad ? "bad" : ""} ref={open.ask ? null : focus}>{open.bad ? `Yes, ${open.name.toLowerCase()}` : open.name}</button>
              <button type="button" class="second" onClick={() => setOpen(undefined)}>Cancel</button>
            </p>
          </form>
        </Dialog>
      )}
      {message && message !== GONE && <p class="panel message" role="status">{message}</p>}
    </>
  );
}

function focus(element: HTMLElement | null): void {
  element?.focus();
}

export const removal = <T,>(name: string, method: string, remove: (item: T) => Promise<unknown>): Action<T> => ({ name, method, bad: true, more: true, run: async (item) => (await remove(item), GONE) });

export const GONE = "\u0000gone";
