/** Markdown as elements: no HTML is ever taken over, nothing is fetched, and links leave the page in their own tab. */

import type { Nodes, Parents, Root } from "mdast";
import { fromMarkdown } from "mdast-util-from-markdown";
import { gfmFromMarkdown } from "mdast-util-gfm";
import { gfm } from "micromark-extension-gfm";
import type { ComponentChildren, VNode } from "preact";
import { useMemo } from "preact/hooks";

const SAFE = /^(https?|mailto):/i;
// Characters that turn the direction of what follows, by which a text can look like another one.
const TURNING = /[\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c]/g;

export function plain(text: string): string {
  return text.replace(TURNING, "�");
}

// The time of the parser grows faster than what it is given: in quotes and lists within each other, and with marks in one block.
const NESTED = /^(?:[ \t]*(?:>|(?:[-+*]|\d{1,9}[.)])[ \t])){33}|^[ \t]{99,}(?:[-+*]|\d{1,9}[.)])[ \t]/m;
const MARKS = /[*_~`[\]<&]/g;
const MARKS_MAX = 2000;

/** Returns the parts of a text; nothing of one that nobody writes for people, which would stop the page. */
export function treeOf(text: string): Root | undefined {
  const isHeavy = NESTED.test(text) || text.split(/\n[ \t\r]*\n/).some((block) => (block.match(MARKS)?.length ?? 0) > MARKS_MAX);
  return isHeavy ? undefined : fromMarkdown(text, { extensions: [gfm()], mdastExtensions: [gfmFromMarkdown()] });
}

export function Markdown({ text }: { text: string }): VNode {
  const tree = useMemo(() => treeOf(plain(text)), [text]);
  return <div class="markdown">{tree ? children(tree) : <pre class="preview">{plain(text)}</pre>}</div>;
}

function children(node: Parents): ComponentChildren {
  return node.children.map((child, key) => <Node key={key} node={child} />);
}

function Node({ node }: { node: Nodes }): VNode | null {
  switch (node.type) {
    case "text":
      return <>{node.value}</>;
    case "html":
      return <code>{node.value}</code>;
    case "paragraph":
      return <p>{children(node)}</p>;
    case "heading": {
      // Below the headings of the page.
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
      return <code>{node.value}</code>;
    case "code":
      return (
        <pre tabIndex={0}>
          <code>{node.value}</code>
        </pre>
      );
    case "blockquote":
      return <blockquote>{children(node)}</blockquote>;
    case "list":
      return node.ordered ? <ol start={node.start ?? 1}>{children(node)}</ol> : <ul>{children(node)}</ul>;
    case "listItem":
      return (
        <li>
          {node.checked === true ? "☑ " : node.checked === false ? "☐ " : ""}
          {children(node)}
        </li>
      );
    case "break":
      return <br />;
    case "thematicBreak":
      return <hr />;
    case "link":
      return SAFE.test(node.url) ? (
        <a href={node.url} target="_blank" rel="noopener noreferrer nofollow" title={node.url}>
          {children(node)}
        </a>
      ) : (
        <span>{children(node)}</span>
      );
    case "image":
      return <span class="quiet">[image: {node.alt || node.url}]</span>;
    case "table":
      return (
        <div class="scroll" tabIndex={0} role="region" aria-label="Table">
          <table>
            <tbody>{children(node)}</tbody>
          </table>
        </div>
      );
    case "tableRow":
      return <tr>{children(node)}</tr>;
    case "tableCell":
      return <td>{children(node)}</td>;
    default:
      return "children" in node ? <>{children(node as Parents)}</> : "value" in node ? <>{node.value as string}</> : null;
  }
}
