"""The titles that models make: when one is asked for, and what becomes of what it says."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from pawl.job_store.ledger.rules.conversations import made_title
from pawl.job_store.ledger.rules.rows import RunRow
from pawl.job_store.ledger.rules.unit_of_work import UnitOfWork

ATTEMPTS_MAX: Final = 3
"""So often a model is asked for the title of a conversation."""
TEXT_CHARACTERS_MAX: Final = 4096
"""Of the message, the answer, and what the model says, no more is looked at."""
_LINES_MAX: Final = 100
_AROUND: Final = " \"'`*_#“”„«»‘’「」"  # noqa: RUF001  # quotes of several languages
_THOUGHT: Final = "</think>"


def ask(unit: UnitOfWork, run: RunRow) -> None:
    """Have a title made of the conversation of a run that has answered.

    Once, and not of one that has a title of its user's, nor of one that does a call of another run, nor of a run of
    another user: what is said in it is the writer's.
    """
    conversation = unit.conversation_of(run)
    is_known = conversation.title or conversation.title_run_id or conversation.parent_run_id
    if not is_known and run.user_id == conversation.user_id:
        unit.put_conversation(replace(conversation, title_at=unit.now, title_run_id=run.run_id))


def said_title(text: str) -> str:
    """Return the title in what a model has said: its first line, without quotes; at most 80 characters."""
    for line in text[:TEXT_CHARACTERS_MAX].rpartition(_THOUGHT)[2].splitlines()[:_LINES_MAX]:
        title = made_title(line).strip(_AROUND)
        if title:
            return title
    return ""
