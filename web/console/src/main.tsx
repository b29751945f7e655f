import { options, render } from "preact";

import { App } from "./app";

let due: (() => void) | undefined;

function flush(): void {
  const draw = due;
  due = undefined;
  draw?.();
}

// Render at most once per frame. A hidden page has no frames.
options.debounceRendering = (draw) => {
  due = draw;
  if (document.hidden) setTimeout(flush);
  else requestAnimationFrame(flush);
};

// Handlers use the state of the last render, and an event can follow the one before within a frame: Enter after a letter.
for (const type of ["keydown", "click", "submit", "input", "change"]) addEventListener(type, flush, true);

render(<App />, document.getElementById("app")!);
