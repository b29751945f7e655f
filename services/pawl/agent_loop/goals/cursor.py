"""The state of a goal's program."""

from __future__ import annotations

import msgspec

from pawl.agent_loop.loop.rules.run import RunFailure


class Attempt(msgspec.Struct, frozen=True, array_like=True):
    """A judged attempt: one sentence about it, and its progress from 0 to 1, or None if unknown."""

    progress: float | None
    reason: str


class Tried(msgspec.Struct, frozen=True, array_like=True):
    """The answer of a recent attempt, and why it was not sufficient. Later attempts receive both."""

    number: int
    answer: str
    reason: str


class GoalCursor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="program", tag="goal"):
    """The state of a goal's program. Its values are bounded, and take up less than 16 KiB in total."""

    # All judged attempts. The next one has the number `len(attempts) + 1`.
    attempts: tuple[Attempt, ...] = ()
    # The last attempts in more detail.
    tried: tuple[Tried, ...] = ()
    # The attempt before which the criterion was last checked.
    checked: int = 0
    # The largest progress so far, and a digest of the last checked result.
    best: float = 0.0
    value_sha256: str = ""
    # Number of attempts since the last progress.
    stalled: int = 0
    # Earliest start of the next attempt.
    not_before: float = 0.0
    met: bool = False
    # Why the goal is met or was last found not to be met.
    reason: str = ""
    # The calls on which the last judgement is based, one line each.
    evidence: tuple[str, ...] = ()
    # True once a model call of an attempt or judgement did not fit the token budget.
    lacks_tokens: bool = False
    # Number of the attempt during which tokens were last added.
    topped_up: int = 0
    # Why no further attempt can succeed.
    failure: RunFailure | None = None
    # True once the report is in the conversation.
    reported: bool = False
