"""Texts in parts. TOOL-7."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.errors import InvalidField, TooLarge
from pawl.tool_registry.domain.document import (
    PART_CHARACTERS_MAX,
    TEXT_BYTES_MAX,
    check_document,
    parts_of,
)
from tests.tables import for_each


@given(st.lists(st.text("aø\n 語", max_size=50), max_size=8), st.integers(1, 5000))
def test_the_parts_of_a_text_are_the_text_and_say_where_they_begin(pieces: list[str], times: int) -> None:
    text = "".join(piece * times for piece in pieces)
    parts = parts_of(text)
    assert "".join(part.content for part in parts) == text
    whole = text.encode()
    for part in parts:
        assert 1 <= len(part.content) <= PART_CHARACTERS_MAX
        assert whole[part.byte_offset :].startswith(part.content.encode())


@for_each("separator", ["\n\n", "\n", " "])
def test_a_text_is_cut_between_paragraphs_lines_or_words(separator: str) -> None:
    first, *_ = parts_of((("x" * 99) + separator) * 2000)
    assert first.content.endswith("x" + separator)


def test_what_cannot_be_kept_is_refused() -> None:
    check_document("Notes on 日本.md", "x" * TEXT_BYTES_MAX, "english")
    with pytest.raises(TooLarge):
        check_document("a", "ø" * (TEXT_BYTES_MAX // 2 + 1), "simple")
    for name, text, language, field in [
        *(("", "", "simple", "name"), ("a" * 201, "", "simple", "name"), ("a\nb", "", "simple", "name")),
        *((" a", "", "simple", "name"), ("a\0", "", "simple", "name"), ("a\u2028b", "", "simple", "name")),
        *(("a", "x\0y", "simple", "text"), ("a", "", "klingon", "language"), ("a", "", "pg_temp.x", "language")),
    ]:
        with pytest.raises(InvalidField) as error:
            check_document(name, text, language)
        assert error.value.metadata["field"] == field
