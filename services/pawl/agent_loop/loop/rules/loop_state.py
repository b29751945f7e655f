"""The part of a run's state that is not in the ledger's rows. Another worker needs it to continue the run.

It is stored as JSON with each commit that changes it, compressed if it is large. Missing fields have their defaults.
"""

from __future__ import annotations

import zlib
from typing import Final

import msgspec
from msgspec import field

from pawl.agent_loop.goals.cursor import GoalCursor
from pawl.agent_loop.loop.rules.condition import Seen
from pawl.agent_loop.loop.rules.run import RunFailure
from pawl.agent_loop.undo.rules import UndoPlan
from pawl.agent_loop.workflows.cursor import WorkflowCursor
from pawl.chassis.ids import CallId
from pawl.errors import Unreadable
from pawl.values import Answer, Usage, WaitKind


class OpenModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """An announced model call that has not ended.

    `attempt` counts all attempts, including attempts by workers that died or handed over the run. `failures` counts the
    model server's failures (LOOP-7), and `empty_answers` its empty answers. The output of this attempt starts at seq
    `output_from_seq`. `usage_before` is the run's usage before this attempt. Once output is shown, the run's usage also
    includes the attempt's usage so far.

    A `held` attempt waits for tokens, a quota or the model server. `tokens_needed` is the number of tokens that the
    attempt needs, if the budget had fewer left. `quota_waits` counts consecutive waits for the same limit: a token
    budget or a limit per minute (`quota_kind`). `outage_since` is when the run started to wait for the model server,
    `outage_waits` counts these waits, and `next_try_time` is the time of the next attempt.
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
    quota_kind: WaitKind | None = None
    outage_since: float | None = None
    outage_waits: int = 0
    next_try_time: float | None = None

    @property
    def summary(self) -> bool:
        return self.summarised_to_number > 0


class CountedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int
    tokens: int


class Digested(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Consecutive iterations with the same result. The result is truncated to 200 bytes."""

    first_round: int
    last_round: int
    result: str


class JobCursor(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="program", tag="job"):
    """The state of a job's program. Its values are bounded, and take up less than 16 KiB in total."""

    # Iterations that failed or whose condition could not be evaluated.
    failures: int = 0
    # Digest of the most recently reported result.
    told_sha256: str = ""
    failed_in_a_row: int = 0
    # The error in evaluating the conditions in the last iteration; empty if there was none.
    problem: str = ""
    # True once the `until` condition is met.
    met: bool = False
    until_seen: Seen | None = None
    when_seen: Seen | None = None
    # True if the `when` condition was false, or its change has not been reported yet.
    is_armed: bool = True
    # How often the condition became true and was reported.
    fired: int = 0
    fired_time: float = 0.0
    # When the condition became true; None if it is false.
    held_time: float | None = None
    # Digest of the changed value. The value must stay the same for the hold time.
    held_sha256: str = ""
    # Results since the last reported digest. Equal consecutive results are merged, and only the latest are kept.
    digest: tuple[Digested, ...] = ()
    # Iterations before those in `digest`.
    digest_left_out: int = 0
    digest_time: float = 0.0
    # When the job was last resumed. Earlier scheduled times are skipped.
    resume_time: float = 0.0
    is_paused: bool = False
    # The largest progress percentage reported, the time of the last progress report, and the number of reports.
    percent_told: int = 0
    progress_told_time: float = 0.0
    progress_reports: int = 0
    # The largest fraction of the open call, and how often the job has progressed; see `progress.advanced`.
    fraction_max: float = 0.0
    advances: int = 0


class LoopState(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a run's state that its worker keeps between steps."""

    model_call: OpenModelCall | None = None
    # The run's active seconds at the start of the current round.
    round_began_active_seconds: float = 0.0
    # How often each recent call was made, by fingerprint.
    call_counts: dict[str, int] = field(default_factory=dict)
    # Fingerprints of the calls in the last rounds, oldest first.
    round_fingerprints: tuple[str, ...] = ()
    # The user's messages waiting for the batch to close.
    steers: tuple[str, ...] = ()
    # Notes to add to the results of open calls.
    notes: dict[CallId, str] = field(default_factory=dict)
    # Calls with an unknown outcome that an operator must resolve.
    in_doubt: tuple[CallId, ...] = ()
    # How often an operator found that an open call had not happened and should run again.
    unknowns_resolved: dict[CallId, int] = field(default_factory=dict)
    # Answers to the questions asked by open calls' tools, in order.
    answers: dict[CallId, tuple[Answer, ...]] = field(default_factory=dict)
    # When to ask the registry again about calls that are completed externally; 0 once completed.
    completions: dict[CallId, float] = field(default_factory=dict)
    # The failure with which the run ends once all of its work has stopped.
    failure: RunFailure | None = None
    # Output of the last failed attempt.
    partial_text: str = ""
    # The last round that was preceded by a summary of the history.
    summarised_round: int = 0
    # Tokens that top-ups have added to the budget.
    tokens_added: int = 0
    # When the run stops waiting for a top-up; None if it is not waiting.
    top_up_deadline_time: float | None = None
    # Number of answers that did not match the response format.
    misfits: int = 0
    # The last prompt; None before the first one and after a summary, which changes the next prompt.
    counted_prompt: CountedPrompt | None = None
    # The state of the run's program, which only the program reads. None for agents.
    cursor: UndoPlan | JobCursor | GoalCursor | WorkflowCursor | None = None
    # True if the last answer was empty, so that no message was added.
    said_nothing: bool = False
    # Number of models that failed. The run continues with the next of its `model_fallbacks`.
    fallbacks_used: int = 0


# A state up to this size is not compressed.
_PLAIN_BYTES_MAX: Final = 4096
# The first byte of compressed data. JSON never starts with it.
_COMPRESSED: Final = b"x"
_decoder: Final = msgspec.json.Decoder(LoopState)
_encode: Final = msgspec.json.Encoder().encode


def write(state: LoopState) -> bytes:
    """Encode a state so that `read` can decode it."""
    data = _encode(state)
    return zlib.compress(data, level=1) if len(data) > _PLAIN_BYTES_MAX else data


def read(data: bytes) -> LoopState:
    """Decode a state. Empty bytes are the state of a run that has not started.

    Raises:
        Unreadable: The bytes are not a valid state.
    """
    try:
        if data.startswith(_COMPRESSED):
            data = zlib.decompress(data)
        return _decoder.decode(data) if data else LoopState()
    except (msgspec.DecodeError, zlib.error) as error:
        raise Unreadable(f"the state of the run is damaged: {error}") from error
