"""Questions to people: those that HUMAN calls are, and those that running tools ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pawl.values import Answer, Question

QUESTION_CHARACTERS_MAX: Final = 4000
OPTIONS_MAX: Final = 20
OPTION_CHARACTERS_MAX: Final = 500


def check_question(question: Question) -> str:
    """Return what is wrong with a question that a tool asks, or an empty text."""
    if not 1 <= len(question.question) <= QUESTION_CHARACTERS_MAX:
        return f"a question has 1 to {QUESTION_CHARACTERS_MAX} characters"
    if len(question.why) > QUESTION_CHARACTERS_MAX:
        return f"the reason of a question has at most {QUESTION_CHARACTERS_MAX} characters"
    if len(question.options) > OPTIONS_MAX or any(len(o) > OPTION_CHARACTERS_MAX for o in question.options):
        return f"a question has at most {OPTIONS_MAX} options of {OPTION_CHARACTERS_MAX} characters"
    return ""


def given(answers: Sequence[Answer], position: int, question: Question) -> int | None:
    """Return where, from `position` on, the answer to a question is that was asked with these words.

    Answers to other words stand before it where the tool asked something else when it ran before.
    """
    return next(
        (number for number in range(position, len(answers)) if answers[number].question == question.question), None
    )
