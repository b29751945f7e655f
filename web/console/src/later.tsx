/** What is not needed at once: all but chat and inbox is in a file of its own, which is read when it is first asked for. */

import { signal } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect } from "preact/hooks";

type More = typeof import("./more");

const more = signal<More | undefined>(undefined);
const isMissing = signal(false);

export function Later({ show }: { show: (all: More) => VNode | null }): VNode | null {
  useEffect(() => {
    if (more.value) return;
    import("./more").then(
      (all) => (more.value = all),
      () => (isMissing.value = true),
    );
  }, []);
  if (more.value) return show(more.value);
  if (!isMissing.value) return <p class="empty" aria-busy="true">One moment ...</p>;
  return (
    <p class="empty" role="alert">
      This page could not be read: the gateway is away, or it is a newer one.{" "}
      <button class="second" onClick={() => location.reload()}>
        Load the console again
      </button>
    </p>
  );
}
