import { options, render } from "preact";

import { App } from "./app";

// Once a frame, however many events come; a hidden page has no frames.
options.debounceRendering = (draw) => void (document.hidden ? setTimeout(draw) : requestAnimationFrame(draw));

render(<App />, document.getElementById("app")!);
