"""The memory of a run beyond the ledger's rows, which a worker leaves so that another can go on.

Stored as JSON with each commit that changes it. Fields that are missing have their defaults.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import field

from pawl.agent_loop.loop.rules.condition import Seen
from pawl.agent_loop.loop.rules.run import RunFailure
from pawl.agent_loop.undo.rules import UndoPlan
from pawl.chassis.ids import CallId
from pawl.values import Answer, Usage


class OpenModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """A model call that was announced and has not ended.

    `attempt` counts all that were made of it, also those of workers that died or
    handed over; `failures` only those in which the model server failed (LOOP-7).
    Output of this attempt has seqs from `output_from_seq` on; `summarised_to_number`
    is 0 unless the call writes a summary. `usage_before` is what the run had used
    before this attempt: while it is open, the run's usage has an estimate of it.
    `held`: the attempt is not made before the token budget is raised.
    `tokens_needed` is what its request was found to cost where the budget had less.
    `empty_answers` counts those failures in which the model said nothing, `quota_waits` how often the call was put off
    because the agent had used up its tokens of the day. `outage_since` is when the run began to wait for the model
    server, `outage_waits` how often it has, `next_try_time` when it asks again.
    """

    attempt: int
    failures: int = 0
    without_tools: bool = False
    output_from_seq: int = 0
    summarised_to_number: int = 0
    usage_before: Usage = field(default_factory=Usage)
    held: bool = False
    empty_answers: int = 0
    tokens_needed: int = 0
    quota_waits: int = 0
    outage_since: float | None = None
    outage_waits: int = 0
    next_try_time: float | None = None

    @property
    def summary(self) -> bool:
        """True if the call writes a summary."""
        return self.summarised_to_number > 0


class CountedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a prompt, and the tokens that the model server counted in it."""

    size_bytes: int
    tokens: int


class Digested(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Iterations one after the other that came to the same, of which the beginning is here."""

    first_round: int
    last_round: int
    said: str


class JobCursor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="program", tag="job"):
    """The place of a job: what its iterations came to so far. Values in it are bounded: it is under 16 KiB."""

    failures: int = 0
    """The iterations that did not succeed, or could not be judged."""
    told_sha256: str = ""
    """A digest of the result that was told last."""
    failed_in_a_row: int = 0
    """The last iterations that are failures."""
    problem: str = ""
    """The error of the conditions in the last iteration; empty for none."""
    met: bool = False
    """True once it has come to what it ends with."""
    until_seen: Seen | None = None
    when_seen: Seen | None = None
    is_armed: bool = True
    """True if what it watches for was not so, or has not been told yet."""
    fired: int = 0
    """The times that it became so and was told."""
    fired_time: float = 0.0
    held_time: float | None = None
    """Since when what it watches for is so; None if it is not."""
    held_sha256: str = ""
    """The digest of the value that has changed and is to stay so."""
    digest: tuple[Digested, ...] = ()
    """The iterations since the last digest that was told, those that came to the same together; the last ones only."""
    digest_left_out: int = 0
    """The iterations before them."""
    digest_time: float = 0.0
    resume_time: float = 0.0
    """The time at which it was resumed last: what was due before is skipped."""
    is_paused: bool = False
    """True if it starts no iteration until it is resumed."""


class LoopState(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    model_call: OpenModelCall | None = None
    round_began_active_seconds: float = 0.0
    """Active seconds of the run when its current round began."""
    call_counts: dict[str, int] = field(default_factory=dict)
    """The number of times that each call was made, by fingerprint; the most recent calls only."""
    round_fingerprints: tuple[str, ...] = ()
    """The calls of the last rounds, oldest first; the most recent ones only."""
    steers: tuple[str, ...] = ()
    """Messages of the user that wait for the batch to close."""
    notes: dict[CallId, str] = field(default_factory=dict)
    """Remarks that will go with the results of open calls, by call id."""
    in_doubt: tuple[CallId, ...] = ()
    """Calls of unknown outcome that an operator must resolve."""
    unknowns_resolved: dict[CallId, int] = field(default_factory=dict)
    """The times an operator found that an open call of unknown outcome had not happened and shall run, by call id."""
    answers: dict[CallId, tuple[Answer, ...]] = field(default_factory=dict)
    """The outcomes of the questions that tools of open calls have asked, in order, by call id."""
    completions: dict[CallId, float] = field(default_factory=dict)
    """The times at which the registry is asked again for calls that somebody outside completes, by call id; 0 once one
    was completed."""
    failure: RunFailure | None = None
    """The failure with which the run will end once all of its work has stopped."""
    partial_text: str = ""
    """The text that the last failed attempt had written."""
    summarised_round: int = 0
    """The last round before which history was summarised."""
    tokens_added: int = 0
    """The tokens that top-ups have added to the budget."""
    agents_tokens: int = 0
    """The part of the run's usage that agents it called have used."""
    top_up_deadline_time: float | None = None
    """Until when the run waits for a top-up; None if it does not."""
    misfits: int = 0
    """The number of answers that did not fit the response format."""
    counted_prompt: CountedPrompt | None = None
    """The last prompt of the run; None before there is one, and after a summary, which makes the next one another."""
    cursor: UndoPlan | JobCursor | None = None
    """The position of the run's program, which only that reads; None for an agent, and before another program starts.
    """
    said_nothing: bool = False
    """True if the last answer was empty, so that no message was added."""
    fallbacks_used: int = 0
    """The number of models that have failed for good: the run goes on with the next of its `model_fallbacks`."""


_decoder: Final = msgspec.json.Decoder(LoopState)
write: Final = msgspec.json.Encoder().encode
"""Returns the bytes that `read` takes."""


def read(data: bytes) -> LoopState:
    """Return the state stored as `data`; empty bytes are the state of a run that has not begun.

    Raises:
        msgspec.DecodeError: the bytes are no such state.
    """
    return _decoder.decode(data) if data else LoopState()
