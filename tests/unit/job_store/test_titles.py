"""What becomes of the titles that models say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.job_store.ledger.rules.conversations import MADE_TITLE_CHARACTERS_MAX, title_in_reply


@pytest.mark.parametrize(
    ("said", "title"),
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
def test_the_first_line_counts_without_what_stands_around_it(said: str, title: str) -> None:
    assert title_in_reply(said) == title


@given(st.text())
def test_a_title_is_one_short_line_whatever_the_model_says(said: str) -> None:
    title = title_in_reply(said)
    assert len(title) <= MADE_TITLE_CHARACTERS_MAX
    assert title.isprintable()
    assert title == title.strip()
