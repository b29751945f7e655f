/** Highlights code: comments, strings, numbers and the words of a language. Small, not exact. */

type Piece = readonly [kind: "" | "comment" | "string" | "number" | "word", text: string];

const C = "break case catch class const continue default do else enum export extends false finally for if import in interface new null private protected public return static super switch this throw true try typeof void while";
const WORDS: Record<string, string> = {
  python: "and as assert async await break class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return True try while with yield",
  javascript: `${C} abstract as async await any boolean declare delete from function implements instanceof let namespace number of readonly satisfies string type undefined unknown var yield`,
  go: "break case chan const continue default defer else fallthrough false for func go if import interface map nil package range return select struct switch true type var",
  rust: "as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while",
  java: `${C} abstract boolean byte char double final float implements instanceof int long package short synchronized throws var record sealed`,
  c: `${C} auto bool char double extern float include int long namespace register short signed sizeof struct template typedef union unsigned using virtual`,
  sql: "add all alter and as asc begin between by case check commit create cross default delete desc distinct drop else end exists foreign from full group having in index inner insert into is join key left like limit not null offset on or order outer primary references returning right rollback select set table then union unique update using values view when where with",
  shell: "case do done elif else esac export fi for function if in local return set then until while",
  ruby: "begin break case class def do else elsif end ensure false for if in module nil not or redo rescue retry return self super then true unless until when while yield",
  json: "true false null",
  yaml: "true false null yes no",
};
const ALIASES: Record<string, string> = {
  ...{ py: "python", python3: "python", js: "javascript", ts: "javascript", typescript: "javascript", jsx: "javascript", tsx: "javascript", rs: "rust", golang: "go" },
  ...{ cpp: "c", "c++": "c", h: "c", csharp: "java", cs: "java", kotlin: "java", sh: "shell", bash: "shell", zsh: "shell", console: "shell", rb: "ruby", yml: "yaml", toml: "yaml", jsonc: "json", postgresql: "sql" },
};
const HASH = new Set(["python", "shell", "ruby", "yaml"]);
const LIMIT = 50_000;
const patterns = new Map<string, RegExp>();

function patternOf(lang: string): RegExp {
  const comment = HASH.has(lang) ? "#.*" : lang === "sql" ? "--.*" : String.raw`\/\/.*|\/\*[^]*?(?:\*\/|$)`;
  const string = String.raw`"""[^]*?(?:"""|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?` + (lang === "javascript" || lang === "go" ? "|`(?:[^`\\\\]|\\\\[^])*`?" : "");
  const words = WORDS[lang]!.replaceAll(" ", "|");
  return new RegExp(String.raw`(${comment})|(${string})|\b(\d[\w.]*)\b|\b(${words})\b|[A-Za-z_]\w*`, lang === "sql" ? "gi" : "g");
}

/** Returns the pieces of the code, in order. Code in an unknown language has one piece. */
export function highlight(code: string, language: string): Piece[] {
  const name = language.toLowerCase();
  const lang = ALIASES[name] ?? name;
  if (!Object.hasOwn(WORDS, lang) || code.length > LIMIT) return [["", code]];
  const pattern = patterns.get(lang) ?? patternOf(lang);
  patterns.set(lang, pattern);
  const pieces: Piece[] = [];
  let at = 0;
  for (const match of code.matchAll(pattern)) {
    const kind = match[1] ? "comment" : match[2] ? "string" : match[3] ? "number" : match[4] ? "word" : "";
    if (!kind) continue;
    if (match.index > at) pieces.push(["", code.slice(at, match.index)]);
    pieces.push([kind, match[0]]);
    at = match.index + match[0].length;
  }
  if (at < code.length) pieces.push(["", code.slice(at)]);
  return pieces;
}
