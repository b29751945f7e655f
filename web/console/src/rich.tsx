/** Draws Markdown as elements. HTML is shown as text, nothing is fetched, and links open a new tab. */

import type { Code, Nodes, Parents, RootContent, Table } from "mdast";
import { type ComponentChildren, Fragment, type VNode } from "preact";
import { useEffect, useReducer, useRef, useState } from "preact/hooks";

import { Growing, isBlank } from "./blocks";
import { CopyButton } from "./copy";
import { visible } from "./visible";

const SAFE = /^(https?|mailto):/i;
/** Images inside the text are shown. Others would be fetched, which reveals the reader to their server. */
const INLINE_IMAGE = /^data:image\/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+$/;
const STEP_MS = 16;

/** A formatted text; `busy` while it grows. A long one is formatted in steps. */
export function Rich({ text, busy = false }: { text: string; busy?: boolean }): VNode {
  const growing = useRef<Growing>(undefined);
  const [, next] = useReducer((count: number) => count + 1, 0);
  const { parts, rest, isDone } = (growing.current ??= new Growing()).grow(text, !busy, performance.now() + STEP_MS);
  useEffect(() => {
    if (!isDone) setTimeout(next, 0);
  });
  level(parts);
  const isShown = busy || !isDone || !parts.every(isBlank);
  return (
    <div class="markdown">
      {isShown && inGroups(parts, (group) => group)}
      {(isShown ? rest : text).trim() && <pre class="preview">{visible(isShown ? rest : text)}</pre>}
    </div>
  );
}

const LEVELS = new WeakMap<Nodes, number>();

/** Moves the model's headings to levels below the page's own headings, without gaps. */
function level(parts: RootContent[]): void {
  let before = 1;
  for (const part of parts) if (part.type === "heading") LEVELS.set(part, (before = Math.min(part.depth + 1, before + 1, 6)));
}

const DRAWN = new WeakMap<Nodes, VNode>();

/** Returns a cached element for a block, so that rendering skips it. */
function drawn(node: Nodes, key: number): VNode {
  const found = DRAWN.get(node) ?? <Node key={key} node={node} />;
  DRAWN.set(node, found);
  return found;
}

const GROUP = 40;
const GROUPS = new WeakMap<Nodes, VNode>();

/** Draws blocks, items or rows in groups. A full group is cached, so that a long text costs no more than its end. */
function inGroups(nodes: readonly Nodes[], wrap: (group: VNode[]) => ComponentChildren, draw = drawn): VNode[] {
  const groups: VNode[] = [];
  for (let at = 0; at < nodes.length; at += GROUP) {
    const first = nodes[at]!;
    const isFull = at + GROUP < nodes.length;
    const group = (isFull && GROUPS.get(first)) || <Fragment key={at}>{wrap(nodes.slice(at, at + GROUP).map(draw))}</Fragment>;
    if (isFull) GROUPS.set(first, group);
    groups.push(group);
  }
  return groups;
}

function children(node: Parents): ComponentChildren {
  return node.children.map((child, key) => <Node key={key} node={child} />);
}

function Node({ node }: { node: Nodes }): VNode | null {
  switch (node.type) {
    case "text": return <>{visible(node.value)}</>;
    case "html": return <code>{visible(node.value)}</code>;
    case "plain": return <pre class="preview">{visible(node.value)}</pre>;
    case "paragraph": return <p>{children(node)}</p>;
    case "heading": {
      const Tag = LEVELS.has(node) ? (`h${LEVELS.get(node)}` as "h2") : "p";
      return <Tag>{children(node)}</Tag>;
    }
    case "strong": return <strong>{children(node)}</strong>;
    case "emphasis": return <em>{children(node)}</em>;
    case "delete": return <del>{children(node)}</del>;
    case "inlineCode": return <code>{visible(node.value)}</code>;
    case "code": return <CodeBlock node={node} />;
    case "blockquote": return <blockquote>{children(node)}</blockquote>;
    case "list": {
      const items = inGroups(node.children, (group) => group);
      return node.ordered ? <ol start={node.start ?? 1}>{items}</ol> : <ul>{items}</ul>;
    }
    case "listItem":
      if (typeof node.checked !== "boolean") return <li>{children(node)}</li>;
      return (
        <li class="task">
          <input type="checkbox" checked={node.checked} disabled aria-label={node.checked ? "Done" : "Open"} />
          <div>{children(node)}</div>
        </li>
      );
    case "break": return <br />;
    case "thematicBreak": return <hr />;
    case "link":
      return SAFE.test(node.url) ? <a href={node.url} target="_blank" rel="noopener noreferrer nofollow" title={visible(node.url)}>{children(node)}</a> : <span>{children(node)}</span>;
    case "image":
      if (INLINE_IMAGE.test(node.url)) return <img src={node.url} alt={visible(node.alt ?? "")} />;
      return <Absent name={node.alt || node.url} url={node.url} />;
    case "imageReference": return <Absent name={node.alt || (node.label ?? "")} />;
    case "footnoteReference": return <sup>[{visible(node.label ?? node.identifier)}]</sup>;
    case "table": return <Rows node={node} />;
    case "tableRow": return <tr>{children(node)}</tr>;
    case "tableCell": return <td>{children(node)}</td>;
    default:
      return "children" in node ? <>{children(node as Parents)}</> : "value" in node ? <>{visible(node.value as string)}</> : null;
  }
}

/** An image that is not shown, with a link to it. */
function Absent({ name, url = "" }: { name: string; url?: string }): VNode {
  const text = `[image: ${visible(name)}]`;
  return SAFE.test(url) ? <a href={url} target="_blank" rel="noopener noreferrer nofollow" title={visible(url)}>{text}</a> : <span class="quiet">{text}</span>;
}

function Rows({ node }: { node: Table }): VNode {
  const [head, ...rows] = node.children;
  const cells = (align: number): string | undefined => (node.align?.[align] === "right" ? "num" : undefined);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Table">
      <table>
        <thead><tr>{head?.children.map((cell, key) => <th key={key} scope="col" class={cells(key)}>{children(cell)}</th>)}</tr></thead>
        {inGroups(rows, (group) => (
          <tbody>{group}</tbody>
        ), (row, key) => <tr key={key}>{(row as Parents).children.map((cell, column) => <td key={column} class={cells(column)}>{children(cell as Parents)}</td>)}</tr>)}
      </table>
    </div>
  );
}

type Highlight = typeof import("./highlight").highlight;
let highlighting: Promise<Highlight | undefined> | undefined;
const LINES = 60;

/** A code block. Its lines are in groups, so that the browser lays out only the growing group. */
function CodeBlock({ node: { value, lang, position } }: { node: Code }): VNode {
  const [highlight, setHighlight] = useState<Highlight>();
  // An open block has no position.
  const isWhole = !!position && !!lang;
  useEffect(() => {
    if (!isWhole) return;
    highlighting ??= import("./highlight").then((found) => found.highlight, () => undefined);
    void highlighting.then((found) => setHighlight(() => found));
  }, [isWhole]);
  const lines = visible(value).split("\n");
  const groups: VNode[] = [];
  for (let at = 0; at < lines.length; at += LINES) {
    const text = lines.slice(at, at + LINES).join("\n");
    groups.push(
      <span key={at} class="lines">
        {highlight && isWhole ? highlight(text, lang!).map(([kind, piece], key) => (kind ? <span key={key} class={kind}>{piece}</span> : piece)) : text}
      </span>,
    );
  }
  return (
    <figure class="code-block">
      <figcaption>
        <span>{visible(lang || "text")}</span>
        <CopyButton text={value} name="Copy code" />
      </figcaption>
      <pre tabIndex={0}><code>{groups}</code></pre>
    </figure>
  );
}
