"""Writes the source of the site into a folder: `python -m docs.site FOLDER DESCRIPTORS`. Run by `make docs`."""

from __future__ import annotations

import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from docs.site import states, tables
from docs.site.contract import Contract

_ROOT: Final = Path(__file__).parents[2]
_LINK: Final = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)#\s]+)")
# The first line of a code block with a file name or `terminal` (tests/system/docs/pages.py).
_FENCE: Final = re.compile(r"^( *```\w+) (\S[^\n]*)$", re.MULTILINE)
# A navigation entry such as `- Decisions: # design/decisions/*.md, added by docs/site`.
_LISTED: Final = re.compile(r"^(?=( +)-)(.*:) # (\S+), added by docs/site$", re.MULTILINE)
_PARTS: Final = ("start", "guides", "reference", "design", "images", "examples")
# Files outside docs/, and the pages of the site that show them.
_ELSEWHERE: Final = {
    "web/client/README.md": "reference/typescript-client.md",
    "tests/faults/README.md": "design/faults.md",
    "tests/requirements.md": "design/requirements.md",
    "bench/results/README.md": "design/targets.md",
    ".env.example": "reference/settings.md",
    "deploy/alerts.yml": "reference/alerts.md",
}


def write(target: Path, contract: Contract) -> None:
    """Replace `target` with the configuration and pages of the site."""
    shutil.rmtree(target, ignore_errors=True)
    pages = target / "pages"
    pages.mkdir(parents=True)
    for part in _PARTS:
        if (_ROOT / "docs" / part).is_dir():
            shutil.copytree(_ROOT / "docs" / part, pages / part)
    shutil.copy(_ROOT / "docs/index.md", pages)
    for source, page in _ELSEWHERE.items():
        if source.endswith(".md"):
            shutil.copy(_ROOT / source, pages / page)
    sources = {page: source for source, page in _ELSEWHERE.items()}
    for path in sorted(pages.rglob("*.md")):
        page = path.relative_to(pages).as_posix()
        text = path.read_text(encoding="utf-8")
        text = states.drawn(text) if page == states.PAGE else text
        path.write_text(_relinked(text, sources.get(page, f"docs/{page}"), page, pages, contract), encoding="utf-8")
    for page, text in {**contract.pages(), **tables.pages(contract)}.items():
        path = pages / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    configuration = (_ROOT / "docs/mkdocs.yml").read_text(encoding="utf-8")
    (target / "mkdocs.yml").write_text(_LISTED.sub(partial(_entries, pages), configuration), encoding="utf-8")


def _entries(pages: Path, match: re.Match[str]) -> str:
    """Return a navigation entry with the pages that its comment names, the index first."""
    found = sorted(pages.glob(match[3]), key=lambda path: (path.name != "index.md", path.name))
    return match[2] + "".join(f"\n{match[1]}    - {path.relative_to(pages).as_posix()}" for path in found)


def _relinked(text: str, source: str, page: str, pages: Path, contract: Contract) -> str:
    """Return a page with titles for code blocks, and links to pages of the site.

    Raises:
        ValueError: a link leads to a file outside the site.
    """

    def replaced(match: re.Match[str]) -> str:
        linked = os.path.normpath(os.path.join(os.path.dirname(source), match[2]))  # noqa: PTH118, PTH120
        return match[1] + os.path.relpath(_placed(linked), os.path.dirname(page) or ".")  # noqa: PTH120

    def _placed(linked: str) -> str:
        if linked in _ELSEWHERE:
            return _ELSEWHERE[linked]
        if linked.startswith("docs/"):
            return linked.removeprefix("docs/")
        if linked.startswith("proto/"):
            return contract.page_of_file(linked.removeprefix("proto/"))
        if linked.endswith(".svg"):
            shutil.copy(_ROOT / linked, pages / "images")
            return f"images/{Path(linked).name}"
        raise ValueError(f"{source} links to {linked}, which is not part of the site. Add it to _ELSEWHERE.")

    text = _FENCE.sub(lambda fence: f'{fence[1]} title="{fence[2].replace("terminal", "in its own terminal")}"', text)
    return _LINK.sub(replaced, text)


if __name__ == "__main__":
    descriptors = FileDescriptorSet.FromString(Path(sys.argv[2]).read_bytes())
    write(Path(sys.argv[1]), Contract(descriptors))
