/** Parses Markdown block by block, also while it grows, so that its cost is linear and no step blocks the page. */

import type { List, Nodes, Root, RootContent, Table } from "mdast";
import { fromMarkdown } from "mdast-util-from-markdown";
import { gfmFromMarkdown } from "mdast-util-gfm";
import { gfm } from "micromark-extension-gfm";

/** Text that is shown as written, because parsing it would block the page. */
interface Plain {
  type: "plain";
  value: string;
}
declare module "mdast" {
  interface RootContentMap {
    plain: Plain;
  }
}

// The parser needs more than linear time for nested quotes and lists, and for many marks in one block.
const NESTED = /^(?:[ \t]*(?:>|(?:[-+*]|\d{1,9}[.)])[ \t])){33}|^[ \t]{99,}(?:[-+*]|\d{1,9}[.)])[ \t]/m;
const MARKS = /[*_~`[\]<&]/g;
const MARKS_MAX = 2000;
const BLOCK_MAX = 32_000;
const TEXT_MAX = 100_000;
const OPTIONS = { extensions: [gfm()], mdastExtensions: [gfmFromMarkdown()] };

/** Formulas: $$a$$, \\[ a \\], \\(a\\), and $a$ if it has a mark of TeX, because prices also have dollar signs. */
const MATH = /\$\$([^$`]+?)\$\$|\\\[\s([^`]+?)\s\\\]|\\\(([^\n`]+?)\\\)|(?<![\\$\w])\$(?=[^\s$])([^$\n`]*[\\^_{}][^$\n`]*)(?<!\s)\$(?![\d$])/g;

/** Marks formulas as code, so that their marks are kept. They are shown as text. */
function mathAsCode(text: string): string {
  if (!/\$|\\[[(]/.test(text)) return text;
  return text.replace(MATH, (_, ...found: (string | undefined)[]) => {
    const formula = found.find((each) => each !== undefined)!.trim();
    return formula.includes("\n") ? `\n\`\`\`math\n${formula}\n\`\`\`\n` : `\`\` ${formula} \`\``;
  });
}

/** Parses a text; undefined if parsing would block the page. */
export function treeOf(source: string): Root | undefined {
  const text = mathAsCode(source);
  const isHeavy = (block: string): boolean => block.length > BLOCK_MAX || (block.match(MARKS)?.length ?? 0) > MARKS_MAX;
  if (text.length > TEXT_MAX || NESTED.test(text) || text.split(/\n[ \t\r]*\n/).some(isHeavy)) return undefined;
  return fromMarkdown(text, OPTIONS);
}

export function isBlank(node: Nodes): boolean {
  if ("children" in node) return node.children.every(isBlank);
  return "value" in node ? !node.value.trim() : node.type === "definition" || node.type === "break";
}

const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})(.*)/;
const ITEM = /^(?:[-+*]|\d{1,9}[.)])(?=[ \t]|$)(?!(?:[ \t]*[-*]){2,}[ \t]*$)/;
const HEADING = /^#{1,6}(?:[ \t]|$)/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
/** References need the whole text, because their definition may be in any block. */
const DEFINITION = /\]:/;
const REFERRING_MAX = 10_000;
/** Rows and items are parsed in batches of about this size, and an open block of at most this size each time. */
const SHORT = 2000;

/** Marks a code block as complete. */
const HERE = { start: { line: 1, column: 1 }, end: { line: 1, column: 1 } };

/** A list or table whose items or rows are parsed as they arrive. */
interface Series {
  head: string; // The first lines of a table, which each batch needs.
  node: List | Table | undefined;
  at: number; // End of the complete items in the text.
}

/** Parses a growing text. Finished blocks are parsed once, and keep their nodes. */
export class Growing {
  readonly #parse: typeof treeOf;
  #text = "";
  #done: RootContent[] = [];
  /** The open block: where it starts, its kind, and how it is parsed. */
  #at = 0;
  #kind: "text" | "list" | "html" | "fence" = "text";
  #marker = "";
  #isMixed = false;
  #isAfterBlank = true;
  #series: Series | undefined;
  #last: RootContent[] = [];
  #parsed = 0;
  /** Start of the next line to scan. */
  #line = 0;

  constructor(parse = treeOf) {
    this.#parse = parse;
  }

  /** Returns the parsed blocks, and the rest as plain text. Stops at a time (`until`); call it again to continue. */
  grow(text: string, isWhole = false, until = Infinity): { parts: RootContent[]; rest: string; isDone: boolean } {
    if (text.includes("\r")) text = text.replace(/\r\n?/g, "\n");
    if (!text.startsWith(this.#text)) this.#restart(0, []);
    this.#text = text;
    if (isWhole && text.length < REFERRING_MAX && DEFINITION.test(text)) return { parts: this.#parse(text)?.children ?? [], rest: "", isDone: true };
    for (let end; (end = text.indexOf("\n", this.#line)) >= 0 || (isWhole && this.#line < text.length); ) {
      if (end < 0) end = text.length;
      const line = text.slice(this.#line, end);
      if (this.#line > this.#at && this.#isStart(line)) {
        if (!this.#advance(this.#line, true, until)) break;
        this.#restart(this.#line, [...this.#done, ...this.#last]);
      }
      this.#scan(line);
      this.#line = Math.min(end + 1, text.length);
    }
    const isDone = this.#line > text.lastIndexOf("\n") && this.#advance(text.length, isWhole, until);
    return { parts: [...this.#done, ...this.#last], rest: text.slice(this.#parsed), isDone };
  }

  #restart(at: number, done: RootContent[]): void {
    [this.#done, this.#last, this.#series] = [done, [], undefined];
    this.#at = this.#parsed = this.#line = at;
    [this.#kind, this.#marker, this.#isMixed, this.#isAfterBlank] = ["text", "", false, true];
  }

  /** Returns whether a line after the first one starts another block. */
  #isStart(line: string): boolean {
    if (this.#kind === "fence") return this.#marker === "";
    if (this.#kind === "html") return this.#isAfterBlank && /^[^\s<]/.test(line) && this.#marker === "";
    const item = ITEM.exec(line)?.[0].slice(-1);
    if (this.#kind === "list" && item === this.#marker) return false;
    if (FENCE.test(line)) return this.#kind !== "list" || line[0] !== " ";
    return HEADING.test(line) || (!!item && /^(?:[-+*]|1[.)])[ \t]+\S/.test(line)) || (this.#isAfterBlank && /^\S/.test(line));
  }

  #scan(line: string): void {
    if (this.#line === this.#at) {
      const [fence, marks = ""] = FENCE.exec(line) ?? [];
      const item = ITEM.exec(line)?.[0].slice(-1) ?? "";
      this.#kind = fence ? "fence" : item ? "list" : /^ {0,3}</.test(line) ? "html" : "text";
      // Some HTML blocks continue after blank lines. Their end is not searched.
      this.#marker = fence ? marks : item || (/^ {0,3}<(?:script|pre|style|textarea|!|\?)/i.test(line) ? "open" : "");
    } else if (this.#kind === "fence") {
      const closing = /^ {0,3}(`+|~+)[ \t]*$/.exec(line)?.[1] ?? "";
      if (closing[0] === this.#marker[0] && closing.length >= this.#marker.length) this.#marker = "";
    } else if (this.#kind === "list") this.#isMixed ||= /^\S/.test(line) && ITEM.exec(line)?.[0].slice(-1) !== this.#marker;
    this.#isAfterBlank = !line.trim();
  }

  /** Parses the open block up to `end`; false if the time is over. */
  #advance(end: number, isWhole: boolean, until: number): boolean {
    if (this.#parsed === end && this.#last.length) return true;
    if (performance.now() > until) return false;
    const block = this.#text.slice(this.#at, end);
    if (block.length > SHORT / 4 && this.#kind === "fence" && !block.startsWith(" ")) {
      const at = block.indexOf("\n") + 1;
      const close = this.#marker ? block.length - Number(block.endsWith("\n")) : block.trimEnd().lastIndexOf("\n");
      const lang = FENCE.exec(block.slice(0, at).trimEnd())?.[2]?.trim().split(/\s/)[0] || null;
      const isOpen = this.#marker && !isWhole;
      [this.#last, this.#parsed] = [[{ type: "code", lang, value: block.slice(at, Math.max(at, close)), ...(isOpen ? {} : { position: HERE }) }], end];
      return true;
    }
    if (block.length > SHORT) {
      const found = this.#advanceSeries(end, isWhole, until);
      if (found !== undefined) return found;
      if (!isWhole && this.#last.length && block.length < (this.#parsed - this.#at) * 1.25) return true;
    }
    this.#last = this.#parse(block)?.children ?? [{ type: "plain", value: block }];
    this.#parsed = end;
    return true;
  }

  /** Parses the new rows of a table, or the new items of a list; undefined if the block is neither. */
  #advanceSeries(end: number, isWhole: boolean, until: number): boolean | undefined {
    const text = this.#text;
    if (this.#isMixed || (this.#kind !== "list" && this.#kind !== "text")) return undefined;
    if (!this.#series) {
      const first = text.indexOf("\n", this.#at);
      const second = text.indexOf("\n", first + 1);
      if (this.#kind === "text" && (second < 0 || !text.slice(this.#at, first).includes("|") || !DELIMITERS.test(text.slice(first + 1, second)))) return undefined;
      const at = this.#kind === "list" ? this.#at : second + 1;
      this.#series = { head: text.slice(this.#at, at), node: undefined, at };
    }
    const series = this.#series;
    for (;;) {
      const next = this.#unitEnd(series.at, end, isWhole);
      if (next <= series.at) break;
      const node = this.#unitsOf(series.head + text.slice(series.at, next));
      if (!node) return undefined;
      const known = series.node?.children ?? [];
      const added = series.head && known.length ? node.children.slice(1) : node.children;
      series.node = { ...(series.node ?? node), children: [...known, ...added] } as List | Table;
      series.at = next;
      [this.#last, this.#parsed] = [[series.node], next];
      if (performance.now() > until) return next >= end;
    }
    const open = text.slice(series.at, end);
    if (open.length > SHORT) return undefined;
    const node = open.trim() ? this.#unitsOf(series.head + open) : undefined;
    if (isWhole && open.trim() && !node) return undefined;
    if (node && series.node) this.#last = [{ ...series.node, children: [...series.node.children, ...node.children.slice(series.head ? 1 : 0)] } as List | Table];
    this.#parsed = end;
    return true;
  }

  /** Returns the end of the next batch of complete rows or items. */
  #unitEnd(from: number, end: number, isWhole: boolean): number {
    let last = from;
    for (let at = from; at < end && last - from < SHORT; ) {
      const newline = this.#text.indexOf("\n", at);
      at = newline < 0 || newline >= end ? end : newline + 1;
      const isEnd = at === end ? isWhole : this.#kind === "text" || /^(?:[-+*]|\d{1,9}[.)])[ \t]/.test(this.#text.slice(at, at + 12));
      if (isEnd) last = at;
    }
    return last;
  }

  /** Parses a list or table; undefined if the text is something else. */
  #unitsOf(source: string): List | Table | undefined {
    const [node, ...others] = this.#parse(source)?.children ?? [];
    return !others.length && (node?.type === "list" || node?.type === "table") ? node : undefined;
  }
}
