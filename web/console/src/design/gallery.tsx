/** The design system on one page, for people who work on the console. */

import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon } from "./icons";
import { Badge, Dialog, Empty, Head, Skeleton, Tabs, Toast, type Tone } from "./parts";

const TONES: [Tone, string][] = [["grey", "Stopped"], ["info", "Running"], ["warn", "Waits for approval"], ["ok", "Completed"], ["bad", "Failed"], ["accent", "Draft"]];
const SURFACES = ["bg", "panel", "sunken", "line", "line-2", "edge", "accent", "accent-soft", "ok-soft", "warn-soft", "bad-soft", "info-soft"];
const BUTTONS = [["", "First"], ["second", "Second"], ["plain", "Plain"], ["bad", "Delete"], ["second bad", "Stop"], ["second small", "Small"]] as const;
const TABS = [["waiting", "Waiting"], ["decided", "Decided"]] as const;

export function Gallery(): VNode {
  const [tab, setTab] = useState<"waiting" | "decided">("waiting");
  const [isOpen, setOpen] = useState(false);
  return (
    <section class="page">
      <Head title="Design" badges={<Badge>{SURFACES.length} surfaces</Badge>} />
      <h2>Text</h2>
      <p class="lead">A lead introduces a page in one or two sentences.</p>
      <p>Text of 14 px with <a href="/design">a link</a>, <code>code</code> and <kbd>Ctrl</kbd> <kbd>K</kbd>.</p>
      <p class="quiet">Quiet text is for details.</p>
      <p class="fault">An error names the problem and the remedy.</p>
      <h2>Colours</h2>
      <div class="swatches">
        {SURFACES.map((name) => <div key={name}><span style={{ background: `var(--${name})` }} /><small>{name}</small></div>)}
      </div>
      <h2>Badges</h2>
      <p class="buttons">
        {TONES.map(([tone, text]) => <Badge key={tone} tone={tone}>{text}</Badge>)}
        <span class="count">3</span>
      </p>
      <h2>Buttons</h2>
      <p class="buttons">
        {BUTTONS.map(([kind, text]) => <button key={text} class={kind}>{text}</button>)}
        <button class="icon" aria-label="Copy"><Icon name="copy" /></button>
        <button disabled>Disabled</button>
      </p>
      <h2>Fields</h2>
      <div class="pair">
        <div class="field">
          <label for="gallery-cron">Cron</label>
          <input id="gallery-cron" value="not a cron" aria-invalid="true" aria-describedby="gallery-fault" />
          <p id="gallery-fault" class="fault">A cron expression has five fields.</p>
        </div>
        <div class="field"><label class="row"><input type="checkbox" checked /> <span>Notify me when it ends</span></label></div>
      </div>
      <h2>Tabs</h2>
      <Tabs name="Samples" all={TABS} open={tab} onOpen={setTab} />
      <h2>Dialogs and toasts</h2>
      <button class="second" onClick={() => setOpen(true)}>Open a dialog</button>
      {isOpen && (
        <Dialog title="A dialog" onClose={() => setOpen(false)}>
          <p>It asks one question.</p>
          <form method="dialog" class="buttons"><button>Close</button></form>
        </Dialog>
      )}
      <Toast tone="ok" onClose={() => {}}>Saved version 4.</Toast>
      <h2>Loading and empty</h2>
      <Skeleton lines={3} />
      <Empty icon="schedules" title="No schedules">
        <p>A schedule starts a run at set times.</p>
        <p class="buttons"><button>New schedule</button></p>
      </Empty>
    </section>
  );
}
