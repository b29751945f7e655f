export { ExecutionPage } from "./execution";
export { Operations } from "./operate/operations";
export { RESOURCES } from "./pages";
export { Detail, List } from "./resource";
export { RunPage } from "./run";
export { Settings } from "./settings";
