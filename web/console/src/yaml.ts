/** The reader of YAML, in a file of its own. */

export { parse } from "yaml";
