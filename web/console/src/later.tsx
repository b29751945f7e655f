/** Lazy loading: all pages except chat and inbox are in a separate file. */

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
  if (!isMissing.value) return <p class="empty" aria-busy="true">Loading ...</p>;
  return (
    <p class="empty" role="alert">
      This page could not be loaded. The gateway is unavailable, or was updated.{" "}
      <button class="second" onClick={() => location.reload()}>
        Reload the console
      </button>
    </p>
  );
}
