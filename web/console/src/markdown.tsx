/** Renders Markdown as elements. HTML is shown as text, nothing is fetched, and links open a new tab. */

import type { Nodes, Parents, Root, RootContent } from "mdast";
import { fromMarkdown } from "mdast-util-from-markdown";
import { gfmFromMarkdown } from "mdast-util-gfm";
import { gfm } from "micromark-extension-gfm";
import type { ComponentChildren, FunctionComponent, VNode } from "preact";
import { useErrorBoundary, useMemo, useRef, useState } from "preact/hooks";

import { visible } from "./visible";

const SAFE = /^(https?|mailto):/i;
// The parser needs more than linear time for nested quotes and lists, and for many marks in one block.
const NESTED = /^(?:[ \t]*(?:>|(?:[-+*]|\d{1,9}[.)])[ \t])){33}|^[ \t]{99,}(?:[-+*]|\d{1,9}[.)])[ \t]/m;
const MARKS = /[*_~`[\]<&]/g;
const MARKS_MAX = 2000;
const BLOCK_MAX = 32_000;
const TEXT_MAX = 100_000;

/** Parses a text; undefined if nothing would be visible, or if parsing would block the page. */
export function treeOf(text: string): Root | undefined {
  const isHeavy = (block: string): boolean => block.length > BLOCK_MAX || (block.match(MARKS)?.length ?? 0) > MARKS_MAX;
  if (text.length > TEXT_MAX || NESTED.test(text) || text.split(/\n[ \t\r]*\n/).some(isHeavy)) return undefined;
  const tree = fromMarkdown(text, { extensions: [gfm()], mdastExtensions: [gfmFromMarkdown()] });
  return isBlank(tree) ? undefined : tree;
}

/** Parses a growing text incrementally: only the last block is parsed again, and a long one only when it is a quarter longer. */
export class Growing {
  readonly #parse: typeof treeOf;
  #text = "";
  /** Finished parts, and where they end. */
  #done: RootContent[] = [];
  #at = 0;
  /** The parts after that, and how much of the text they cover. */
  #last: RootContent[] = [];
  #parsed = 0;

  constructor(parse = treeOf) {
    this.#parse = parse;
  }

  /** Returns the parsed parts, and the rest as plain text. */
  grow(text: string): { parts: RootContent[]; rest: string } {
    if (!text.startsWith(this.#text)) [this.#done, this.#last, this.#at, this.#parsed] = [[], [], 0, 0];
    this.#text = text;
    const tail = text.slice(this.#at);
    if (tail.length <= SHORT || tail.length > this.#parsed * 1.25) {
      const found = this.#parse(tail)?.children ?? [];
      const startOf = (node: RootContent): number => tail.lastIndexOf("\n", (node.position?.start.offset ?? 0) - 1) + 1;
      // A block may still become part of the previous one, unless a blank line precedes it and its first line is complete.
      const begins = (start: number): boolean => /\n[ \t\r]*\n$/.test(tail.slice(0, start)) && tail.includes("\n", start);
      const at = Math.max(0, found.findLastIndex((node) => begins(startOf(node))));
      const from = found[at] ? startOf(found[at]) : 0;
      this.#done = [...this.#done, ...found.slice(0, at)];
      this.#last = found.slice(at);
      this.#at += from;
      this.#parsed = tail.length - from;
    }
    return { parts: [...this.#done, ...this.#last], rest: text.slice(this.#at + (this.#last.length ? this.#parsed : 0)) };
  }
}

const SHORT = 2000;

function isBlank(node: Nodes): boolean {
  if ("children" in node) return node.children.every(isBlank);
  return "value" in node ? !node.value.trim() : node.type === "definition" || node.type === "break";
}

/** Shows `children`, or `text` if they fail to render. A new text is tried again. */
export function Boundary({ text = "", children }: { text?: string; children: ComponentChildren }): VNode {
  const [failed, setFailed] = useState<{ text: string; message: string }>();
  useErrorBoundary((error) => {
    console.error(error);
    setFailed({ text, message: error instanceof Error ? error.message : String(error) });
  });
  if (failed?.text !== text) return <>{children}</>;
  return (
    <div class="card bad">
      <p class="quiet">The formatted view failed{text ? ". This is the plain text:" : `: ${visible(failed.message)}`}</p>
      {text && <pre class="preview">{visible(text)}</pre>}
    </div>
  );
}

/** Returns a component that falls back to plain text if `View` fails to render. */
export function bounded<P extends object>(View: FunctionComponent<P>, textOf: (props: P) => string): FunctionComponent<P> {
  return (props) => (
    <Boundary text={textOf(props)}>
      <View {...props} />
    </Boundary>
  );
}

/** A formatted text; `busy` while it grows. */
export const Markdown = bounded(Rich, ({ text }: { text: string; busy?: boolean }) => text);

function Rich({ text, busy = false }: { text: string; busy?: boolean }): VNode {
  const growing = useRef<Growing>(undefined);
  const { parts, rest } = useMemo(() => {
    if (busy) return (growing.current ??= new Growing()).grow(text);
    const tree = treeOf(text);
    return tree ? { parts: tree.children, rest: "" } : { parts: [], rest: text };
  }, [text, busy]);
  return (
    <div class="markdown">
      {parts.map(drawn)}
      {rest.trim() && <pre class="preview">{visible(rest)}</pre>}
    </div>
  );
}

const DRAWN = new WeakMap<Nodes, VNode>();

/** Returns a cached element for a part, so that rendering skips it. */
function drawn(node: RootContent, key: number): VNode {
  const found = DRAWN.get(node) ?? <Node key={key} node={node} />;
  DRAWN.set(node, found);
  return found;
}

function children(node: Parents): ComponentChildren {
  return node.children.map((child, key) => <Node key={key} node={child} />);
}

function Node({ node }: { node: Nodes }): VNode | null {
  switch (node.type) {
    case "text":
      return <>{visible(node.value)}</>;
    case "html":
      return <code>{visible(node.value)}</code>;
    case "paragraph":
      return <p>{children(node)}</p>;
    case "heading": {
      // Start below the heading levels of the page.
      const Tag = `h${Math.min(node.depth + 2, 6)}` as "h3";
      return <Tag>{children(node)}</Tag>;
    }
    case "strong":
      return <strong>{children(node)}</strong>;
    case "emphasis":
      return <em>{children(node)}</em>;
    case "delete":
      return <del>{children(node)}</del>;
    case "inlineCode":
      return <code>{visible(node.value)}</code>;
    case "code":
      return (
        <pre tabIndex={0}>
          <code>{visible(node.value)}</code>
        </pre>
      );
    case "blockquote":
      return <blockquote>{children(node)}</blockquote>;
    case "list":
      return node.ordered ? <ol start={node.start ?? 1}>{children(node)}</ol> : <ul>{children(node)}</ul>;
    case "listItem":
      return (
        <li class={typeof node.checked === "boolean" ? "task" : undefined}>
          {typeof node.checked === "boolean" && <span>{node.checked ? "☑ " : "☐ "}</span>}
          {children(node)}
        </li>
      );
    case "break":
      return <br />;
    case "thematicBreak":
      return <hr />;
    case "link":
      return SAFE.test(node.url) ? (
        <a href={node.url} target="_blank" rel="noopener noreferrer nofollow" title={visible(node.url)}>
          {children(node)}
        </a>
      ) : (
        <span>{children(node)}</span>
      );
    case "image":
    case "imageReference":
      return <span class="quiet">[image: {visible(node.alt || ("url" in node ? node.url : (node.label ?? "")))}]</span>;
    case "footnoteReference":
      return <sup>[{visible(node.label ?? node.identifier)}]</sup>;
    case "table":
      return (
        <div class="scroll" tabIndex={0} role="region" aria-label="Table">
          <table>
            <thead>
              <tr>
                {node.children[0]?.children.map((cell, key) => (
                  <th key={key} scope="col">
                    {children(cell)}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {node.children.slice(1).map((row, key) => (
                <Node key={key} node={row} />
              ))}
            </tbody>
          </table>
        </div>
      );
    case "tableRow":
      return <tr>{children(node)}</tr>;
    case "tableCell":
      return <td>{children(node)}</td>;
    default:
      return "children" in node ? <>{children(node as Parents)}</> : "value" in node ? <>{visible(node.value as string)}</> : null;
  }
}
