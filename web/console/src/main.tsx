import { options, render } from "preact";

import { App } from "./app";

// Render at most once per frame. A hidden page has no frames.
options.debounceRendering = (draw) => void (document.hidden ? setTimeout(draw) : requestAnimationFrame(draw));

render(<App />, document.getElementById("app")!);
