"""Cleaning of titles written by models."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.job_store.ledger.rules.conversations import MADE_TITLE_CHARACTERS_MAX, title_in_reply


@pytest.mark.parametrize(
    ("written", "title"),
    [
        ("Lunch with Ann", "Lunch with Ann"),
        ('"Lunch with Ann"', "Lunch with Ann"),
        ("\n\n**„Essen mit Ann“**\nThat is a good title.", "Essen mit Ann"),
        ("# Lunch\twith\x1b[31m Ann\u202e", "Lunch with [31m Ann"),
        ("<think>\nWhat is it about?\n</think>\nLunch with Ann", "Lunch with Ann"),
        ('""\n***\n', ""),
        ("", ""),
    ],
)
def test_a_title_is_the_first_line_without_decoration(written: str, title: str) -> None:
    assert title_in_reply(written) == title


@given(st.text())
def test_a_title_is_always_one_short_line(written: str) -> None:
    title = title_in_reply(written)
    assert len(title) <= MADE_TITLE_CHARACTERS_MAX
    assert title.isprintable()
    assert title == title.strip()
