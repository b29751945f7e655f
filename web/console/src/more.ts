export { ExecutionPage } from "./execution";
export { RESOURCES } from "./pages";
export { Detail, List } from "./resource";
export { RunPage } from "./run";
export { Settings } from "./settings";
