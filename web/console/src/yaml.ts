/** The reader and writer of YAML, in a file of its own. */

export { LineCounter, parse, parseDocument, stringify } from "yaml";
