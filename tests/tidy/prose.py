"""Print the passages with the most phrases to avoid in plain English: `python -m tests.tidy.prose [PATH ...]`.

This is a report for writers, not a test. A passage is a docstring, comment, message, test name, paragraph of a
document, proto comment or text of the web pages. `--each` prints the density of each kind in each folder instead.
"""

from __future__ import annotations

import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.tidy.tree import files, name

_PHRASES = re.compile(
    r"\b(?:"
    r"goes on|go on|going on|went on|gone on|goes its way"
    r"|gives? up|gave up|given up|giving up|lets? go of|let go"
    r"|is told|are told|be told|was told|were told|tells?|told|telling"
    r"|said|says|what .{1,20} is said"
    r"|nobody|anybody|everybody|somebody|whoever|whatever|who asks|who asked"
    r"|strangers?"
    r"|takings?|wish(?:es)?|misfits?|purses?|doors?|the house"
    r"|looks? at|looks? after|looked at|looking|(?:a|one|next|last|each|every|between) looks?"
    r"|is away|are away|was away|be away|while .{1,20} away"
    r"|in place of|in its place|by itself|by themselves|at once|meanwhile|any more"
    r"|stands?|stood|standing"
    r"|as it is|as they are|as it was|as it came|as they came|as it comes"
    r"|become of|became of|becomes of|come of|comes of"
    r"|that of|those of|the one of|one that|ones that|that which|of which|by which|with which|for which|from which"
    r"|what is there|has none|have none|there is none|of none"
    r"|what (?:is|are|was|were|has|have|had|it|they|one|a|an|the|must|may|can|goes|comes|stays|waits|ends|runs)"
    r"|begins?|began|begun|beginning"
    r"|places?(?= (?:is|are|for|of|in|free|left|taken))|places"
    r"|is to be|are to be|was to be|have been to"
    r"|mends?|mended|mending|dearer|likeness"
    r")\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_SENTENCE_WORDS_MIN = 4


class Passage(NamedTuple):
    kind: str
    path: str
    line: int
    text: str

    @property
    def words(self) -> int:
        return len(_WORD.findall(self.text))

    @property
    def phrases(self) -> list[str]:
        return _PHRASES.findall(self.text)


def passages(path: Path) -> Iterator[Passage]:
    shown = name(path)
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".py":
            yield from _python(shown, text)
        case ".proto":
            yield from _comments("proto", shown, text, r"^\s*//(.*)$")
        case ".md":
            yield from _markdown(shown, text)
        case ".ts" | ".tsx" | ".js":
            yield from _comments("web", shown, text, r"^\s*(?://|/?\*+)(.*)$")
            for found in re.finditer(r"\"([^\"\n]+)\"|`([^`\n]+)`|>([^<>{}\n]+)<", text):
                quoted = next(group for group in found.groups() if group)
                if len(_WORD.findall(quoted)) >= _SENTENCE_WORDS_MIN:
                    yield Passage("web", shown, text.count("\n", 0, found.start()) + 1, quoted)


def _python(name: str, text: str) -> Iterator[Passage]:
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for child in body:
                if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                    docstrings.add(child.value)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield Passage("test name", name, node.lineno, node.name[5:].replace("_", " "))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            kind = "docstring" if node in docstrings else "message"
            if len(_WORD.findall(node.value)) >= _SENTENCE_WORDS_MIN and "SELECT" not in node.value:
                yield Passage(kind, name, node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield Passage("comment", name, token.start[0], token.string.split("noqa")[0])


def _comments(kind: str, name: str, text: str, pattern: str) -> Iterator[Passage]:
    gathered: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if found := re.match(pattern, line):
            gathered.append(found[1])
        elif gathered:
            yield Passage(kind, name, number - len(gathered), " ".join(gathered))
            gathered = []


def _markdown(name: str, text: str) -> Iterator[Passage]:
    kind = "changelog" if name == "CHANGELOG.md" else "document"
    fenced, start, gathered = False, 1, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        if not fence and not fenced and line.strip():
            start = start if gathered else number
            gathered.append(re.sub(r"\]\([^)]*\)|`[^`]*`", " ", line))
        elif gathered:
            yield Passage(kind, name, start, " ".join(gathered))
            gathered = []
        fenced ^= fence


def main(arguments: list[str]) -> None:
    chosen = tuple(argument for argument in arguments if not argument.startswith("--"))
    found = [
        passage
        for path in files(".py", ".proto", ".md", ".ts", ".tsx", ".js")
        if not chosen or name(path).startswith(chosen)
        for passage in passages(path)
        if passage.path != name(Path(__file__))
    ]
    words, phrases = collections.Counter[tuple[str, str]](), collections.Counter[tuple[str, str]]()
    for passage in found:
        folders = Path(passage.path).parts[:-1]
        for folder in ("", "/".join(folders[: 3 if folders[:1] == ("services",) else 2])):
            words[passage.kind, folder] += passage.words
            phrases[passage.kind, folder] += len(passage.phrases)
    lines = []
    for (kind, folder), count in sorted(words.items()):
        if "--each" in arguments or not folder:
            density = 1000 * phrases[kind, folder] / max(1, count)
            lines.append(f"{density:5.1f} per 1,000 of {count:6} words: {kind} {folder}")
    if "--each" not in arguments:
        found.sort(key=lambda passage: len(passage.phrases) ** 2 / (passage.words + 10), reverse=True)
        for passage in found[:50]:
            lines.append(f"{passage.path}:{passage.line}: {', '.join(passage.phrases)}")
            lines.append(f"    {' '.join(passage.text.split())[:300]}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
