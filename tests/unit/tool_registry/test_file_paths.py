"""Which paths there are for the file tools: one spelling for each, none that leads out. TOOL-7, LOOP-9."""

from __future__ import annotations

import os
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from pawl.tool_registry.domain.files import path_problem
from tests.tables import for_each


@for_each("path", ["a", "notes/plan.md", "ä/ø/日本語.txt", ".hidden", "a b/c d", "...", "-rf", "x" * 200])
def test_plain_paths_are_accepted(path: str) -> None:
    assert not path_problem(path)


@for_each(
    "path",
    [
        *("", "/", "/etc/passwd", "..", ".", "../x", "a/..", "a/../b", "a/./b", "./a", "a//b", "a/", "//a"),
        *("a\\b", "..\\x", "C:\\x", "a\0b", "a\nb", "a\x7fb", "a\u202eb", "a\u200bb", "\ufeffa", "a\u2028b"),
        *("a\u00a0b", " a", "a ", "a/ b", "e\u0301", "x" * 201, "ø" * 101, "/".join("a" * 17), "a" * 513, "\ud800"),
    ],
)
def test_others_are_refused_with_a_reason(path: str) -> None:
    assert path_problem(path)


@given(st.text(st.sampled_from("ab./\\ \0\u0301e\u00e9~\u202e")) | st.text())
def test_what_is_accepted_stays_below_its_folder_and_has_one_spelling(path: str) -> None:
    if path_problem(path):
        return
    assert os.path.normpath(f"/root/{path}") == f"/root/{path}"
    assert unicodedata.normalize("NFC", path) == path
    assert "\0" not in path
