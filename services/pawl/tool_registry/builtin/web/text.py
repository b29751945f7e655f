"""Extracts readable text from web responses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urljoin

LINKS_MAX: Final = 200
# Main text is only extracted from pages with at most this many elements, because it takes more than linear time.
ELEMENTS_MAX: Final = 15_000

_HTML: Final = frozenset({"text/html", "application/xhtml+xml"})
_TEXT: Final = re.compile(r"text/.+|application/(.+\+)?(json|xml|yaml|toml)|application/(javascript|x-ndjson|x-yaml)")
_CHARSET: Final = re.compile(r"charset\s{0,8}=\s{0,8}[\"']?\s{0,8}([\w.:-]{1,40})", re.ASCII | re.IGNORECASE)
# Only web charsets are accepted, because some Python codecs are slow or are not charsets at all.
_KNOWN_CHARSET: Final = re.compile(
    r"utf-?8|utf-?16(le|be)?|(windows-|cp)\d+|iso-?8859-\d+|koi8-[ru]|gb(k|2312|18030)|big5(-?hkscs)?|euc-(jp|kr)"
    r"|shift[_-]?jis|iso-2022-jp|(us-)?ascii|latin-?1|macintosh"
)
_MARKS: Final = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
_HEAD_BYTES: Final = 2048
_TYPE_CHARACTERS_MAX: Final = 256
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_UNREAD: Final = frozenset({"head", "script", "style", "noscript", "template", "svg"})
_INLINE: Final = frozenset({"a", "b", "code", "em", "i", "small", "span", "strong", "sub", "sup"})
_BLANK_LINES: Final = re.compile(r"\n\s*\n\s*")


class NotText(Exception):
    """Raised when the content is not text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The readable part of a page."""

    title: str
    text: str
    # The text and URL of each link to another page, in order, up to LINKS_MAX links.
    links: tuple[tuple[str, str], ...]


def read_page(body: bytes, content_type: str, url: str) -> Page:
    """Return the readable text of an HTML page, or the body itself for other text types.

    This can take several seconds of CPU time, so call it in a helper process.

    Raises:
        NotText: The content is neither HTML nor another text type.
    """
    content_type = content_type[:_TYPE_CHARACTERS_MAX]
    kind = content_type.partition(";")[0].strip().lower()
    if not kind:
        kind = "text/html" if body.lstrip()[:1] == b"<" else "text/plain"
    if kind not in _HTML and not _TEXT.fullmatch(kind):
        raise NotText(f"{kind[:100]} is not text")
    text = _CONTROL.sub("", _decode(body, content_type))
    if kind in _HTML:
        return _read_html(text, url)
    return Page(title="", text=text, links=())


def _decode(body: bytes, content_type: str) -> str:
    for mark, charset in _MARKS:
        if body.startswith(mark):
            return body.decode(charset, "replace")
    for declaration in (content_type, body[:_HEAD_BYTES].decode("latin-1")):
        found = _CHARSET.search(declaration)
        if found and _KNOWN_CHARSET.fullmatch(found[1].lower()):
            try:
                return body.decode(found[1], "replace")
            except LookupError:
                continue
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body.decode("windows-1252", "replace")


def _read_html(text: str, url: str) -> Page:
    import trafilatura  # noqa: PLC0415  # the import takes a third of a second and is only needed where pages are read

    # The parser rejects text that does not look like a page, so add the usual tags.
    tree = trafilatura.load_html(text)
    if tree is None:
        tree = trafilatura.load_html(f"<!DOCTYPE html><html><body>{text}</body></html>")
    if tree is None:
        return Page(title="", text="", links=())
    title = " ".join((tree.findtext(".//title") or "").split())
    links = _links(tree, url)
    found: str | None = None
    if sum(1 for _ in tree.iter()) <= ELEMENTS_MAX:
        found = trafilatura.extract(
            tree, url=url, output_format="markdown", include_comments=False, include_links=False, favor_recall=True
        )
    return Page(title=_clean(title), text=_clean(found or _all_text(tree)), links=links)


def _links(tree: Any, url: str) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for anchor in tree.iter("a"):
        try:
            target = urljoin(url, (anchor.get("href") or "").strip()).partition("#")[0]
        except ValueError:
            continue
        if target.startswith(("http://", "https://")) and target != url and not found.get(target):
            found[target] = _clean(" ".join("".join(anchor.itertext()).split()))[:200]
        if len(found) == LINKS_MAX:
            break
    return tuple((text, _clean(target)) for target, text in found.items())


def _all_text(tree: Any) -> str:
    parts: list[str] = []
    unread = 0
    # Not recursive, because pages can be deeply nested.
    to_visit = [(tree, False)]
    while to_visit:
        element, is_left = to_visit.pop()
        is_unread = not isinstance(element.tag, str) or element.tag in _UNREAD
        if is_left:
            unread -= is_unread
            if not unread:
                parts.append(element.tail or "")
            continue
        unread += is_unread
        if not unread:
            parts.append(("" if element.tag in _INLINE else "\n") + (element.text or ""))
        to_visit.append((element, True))
        to_visit.extend((child, False) for child in reversed(element))
    lines = (" ".join(line.split()) for line in "".join(parts).splitlines())
    return _BLANK_LINES.sub("\n", "\n".join(lines)).strip()


def _clean(text: str) -> str:
    return _CONTROL.sub("", text.encode("utf-8", "replace").decode())
