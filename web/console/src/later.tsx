/** Lazy loading: all pages except chat and inbox are in files of their own. */

import { signal } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect } from "preact/hooks";

import { Skeleton } from "./design/parts";

/** Returns a component that loads a module once, then shows it. */
export function lazy<M>(load: () => Promise<M>, waiting: VNode | null = <div class="page"><Skeleton /></div>): (props: { show: (all: M) => VNode | null }) => VNode | null {
  const found = signal<M | undefined>(undefined);
  const isMissing = signal(false);
  return function Lazy({ show }) {
    useEffect(() => {
      if (found.value) return;
      load().then((all) => (found.value = all), () => (isMissing.value = true));
    }, []);
    if (found.value) return show(found.value);
    if (!isMissing.value) return waiting;
    return (
      <div class="empty" role="alert">
        <p>This page could not be loaded. The gateway is unavailable, or was updated.</p>
        <button class="second" onClick={() => location.reload()}>Reload the console</button>
      </div>
    );
  };
}

export const Later = lazy(() => import("./more"));
export const Design = lazy(() => import("./design/gallery"));
export const Search = lazy(() => import("./palette"), null);
