export { ExecutionPage } from "./execution";
export { RESOURCES } from "./pages";
export { Detail, List } from "./resource";
export { RunPage } from "./runs";
export { Settings } from "./settings";
