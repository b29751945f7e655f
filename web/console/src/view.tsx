/** The log of a run: reasoning, text, calls, retries and warnings. */

import type { NoteView, RunView, RoundView } from "@pawl/client";
import { Fragment, type VNode } from "preact";

import { CallCard, TopUp } from "./cards";
import { Icon } from "./design/icons";
import { Markdown } from "./markdown";
import { iconOf, title } from "./sentence";
import { lasted, word } from "./state";
import { visible } from "./visible";

/** With `isExplained`, the page shows elsewhere why the run waits or failed. */
export function RunLog({ view, answers = [], isExplained }: { view: RunView; answers?: string[]; isExplained?: true }): VNode {
  const { run, ended } = view;
  const last = view.rounds.at(-1);
  const loose = Object.values(view.calls).filter((call) => !view.rounds.some((round) => round.callIds.includes(call.callId ?? "")));
  const waiting = run.waiting?.sentence;
  return (
    <div class="log" aria-live="polite" aria-busy={!ended}>
      {view.gap && <p class="quiet">Earlier events are no longer stored.</p>}
      {view.notes.filter((note) => !view.rounds.some(({ round }) => round === note.round)).map(noteView)}
      {view.rounds.map((round) => <Round key={round.round} round={round} view={view} busy={run.state === "RUN_STATE_RUNNING" && round === last && !round.done} />)}
      {loose.map((call) => <CallCard key={call.callId} call={call} progress={view.progress[call.callId ?? ""]} />)}
      {view.gap && (answers.length ? answers : [run.outputText ?? ""]).map((text, key) => <Markdown key={key} text={text} />)}
      {run.waits?.includes("WAIT_KIND_BUDGET") && !ended && <TopUp run={run} />}
      {!isExplained && !ended && waiting && <p class="quiet state">{visible(waiting)}</p>}
      {!isExplained && run.state === "RUN_STATE_NEEDS_ATTENTION" && <p class="fault">Needs an operator: {word(run.attention?.reason?.replace("ATTENTION_REASON_", ""))}</p>}
      {!isExplained && run.state === "RUN_STATE_FAILED" && <p class="fault" role="alert">Failed: {visible(run.failure?.message ?? run.failure?.reason ?? "")}</p>}
      {run.state === "RUN_STATE_CANCELLED" && <p class="quiet">Stopped.</p>}
      {!view.rounds.length && !ended && !isExplained && <p class="quiet dots">{word(run.state) || "Loading"} </p>}
    </div>
  );
}

function Round({ round, view, busy }: { round: RoundView; view: RunView; busy: boolean }): VNode {
  const at = (position: number): VNode[] => view.notes.filter((note) => note.round === round.round && note.position === position).map(noteView);
  return (
    <>
      {at(-1)}
      {round.reasoning && (
        <details class="reasoning">
          <summary class={busy && !round.text ? "dots" : ""}>{thought(round, busy)}</summary>
          <Markdown text={round.reasoning} busy={busy} />
        </details>
      )}
      {round.text && <Markdown text={round.text} busy={busy} />}
      {at(0)}
      {round.drafts.map((draft, key) => (
        <article key={key} class="card call">
          <p class="row">
            <Icon name={iconOf(draft.toolName)} />
            <strong>{draft.toolName ? title(draft.toolName) : "..."}</strong> <span class="state dots">preparing</span>
          </p>
        </article>
      ))}
      {round.callIds.map((id, key) => (
        <Fragment key={id}>
          {view.calls[id] && <CallCard call={view.calls[id]} progress={view.progress[id]} />}
          {at(key + 1)}
        </Fragment>
      ))}
      {busy && !round.text && !round.reasoning && !round.drafts.length && <p class="quiet dots" />}
    </>
  );
}

function thought({ text, reasoningSeconds, done }: RoundView, busy: boolean): string {
  if (reasoningSeconds !== undefined) return `Thought for ${reasoningSeconds < 1 ? "a moment" : lasted(reasoningSeconds)}`;
  return busy && !text && !done ? "Thinking" : "Thought";
}

function noteView({ kind, text }: NoteView, key: number): VNode {
  const shown = visible(text);
  if (kind === "message") return <div key={key} class="mine">{shown}</div>;
  return (
    <p key={key} class="quiet" data-note={kind}>
      {kind === "retry" ? `A model call failed (${shown}) and was retried.` : kind === "warning" ? `⚠ ${shown}` : `↩ ${shown || "background update"}`}
    </p>
  );
}
