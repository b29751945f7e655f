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

// Handlers use the state of the last render, and Enter can follow a letter within a frame. A field is drawn after its
// handler, because drawing it before would restore the text that the state has.
for (const type of ["keydown", "click", "submit"]) addEventListener(type, flush, true);
for (const type of ["input", "change"]) addEventListener(type, flush);

render(<App />, document.getElementById("app")!);
