/** The reader and writer of YAML, in a file of its own. */

export { parse, stringify } from "yaml";
