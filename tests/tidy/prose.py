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
    shown, text = name(path), path.read_text(encoding="utf-8")
    match path.suffix:
        case ".py":
            yield from _python(shown, text)
        case ".proto":
            yield from _found("proto", shown, text, r"(?:^[ \t]*//.*\n?)+", r"^[ \t]*//")
        case ".md":
            kind = "changelog" if shown == "CHANGELOG.md" else "document"
            prose = re.sub(
                r"^ *```(?:.|\n)*?^ *```.*$", lambda fenced: "\n" * fenced[0].count("\n"), text, flags=re.MULTILINE
            )
            yield from _found(kind, shown, prose, r"(?:^.*\S.*\n?)+", r"\]\([^)]*\)|`[^`]*`")
        case ".ts" | ".tsx" | ".js":
            yield from _found("web", shown, text, r"(?:^[ \t]*(?://|/?\*+).*\n?)+", r"^[ \t]*(?://|/?\*+)")
            quoted = _found("web", shown, text, r"\"[^\"\n]+\"|`[^`\n]+`|>[^<>{}\n]+<", r"[\"`<>]")
            yield from (passage for passage in quoted if passage.words >= _SENTENCE_WORDS_MIN)


def _python(name: str, text: str) -> Iterator[Passage]:
    nodes = list(ast.walk(ast.parse(text)))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {ast.get_docstring(node, clean=False) for node in nodes if isinstance(node, documented)}
    for node in nodes:
        match node:
            case ast.FunctionDef(name=test) | ast.AsyncFunctionDef(name=test) if test.startswith("test_"):
                yield Passage("test name", name, node.lineno, test[5:].replace("_", " "))
            case ast.Constant(value=str(said)) if "SELECT" not in said:
                passage = Passage("docstring" if said in docstrings else "message", name, node.lineno, said)
                yield from [passage] if passage.words >= _SENTENCE_WORDS_MIN else []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield Passage("comment", name, token.start[0], token.string.split("noqa")[0])


def _found(kind: str, name: str, text: str, pattern: str, markup: str) -> Iterator[Passage]:
    """Yield each match of a pattern without its markup."""
    for found in re.finditer(pattern, text, re.MULTILINE):
        line = text.count("\n", 0, found.start()) + 1
        yield Passage(kind, name, line, " ".join(re.sub(markup, " ", found[0], flags=re.MULTILINE).split()))


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
