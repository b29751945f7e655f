"""Questions to people: those that HUMAN calls are, and those that running tools ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

QUESTION_CHARACTERS_MAX: Final = 4000
OPTIONS_MAX: Final = 20
OPTION_CHARACTERS_MAX: Final = 500
KINDS: Final = ("clarification", "permission", "confirmation")


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question, its reason, and the answers to choose from; free text is always an answer."""

    question: str
    why: str = ""
    kind: str = "clarification"
    options: tuple[str, ...] = ()
    default_answer: str = ""
    """Taken when nobody answers in time."""
    timeout_seconds: float = 0.0
    """The time for which it waits; 0 means as long as the run says."""
    answer_schema_json: bytes = b""
    """The schema that an answer must meet; empty if any will do."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a question that a running tool asked."""

    question: str
    answer: str = ""
    is_declined: bool = False


def check_question(question: Question) -> str:
    """Return what is wrong with a question that a tool asks, or an empty text."""
    if not 1 <= len(question.question) <= QUESTION_CHARACTERS_MAX:
        return f"a question has 1 to {QUESTION_CHARACTERS_MAX} characters"
    if len(question.why) > QUESTION_CHARACTERS_MAX:
        return f"the reason of a question has at most {QUESTION_CHARACTERS_MAX} characters"
    if question.kind not in KINDS:
        return f"the kind of a question is one of {', '.join(KINDS)}"
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
