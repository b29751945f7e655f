"""From what a person types to a decision: bound to what was shown, and never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pawl.cli import answers
from pawl.event.v1 import call_pb2

GATED = call_pb2.Call(
    run_id="run_1",
    call_id="call_1",
    state=call_pb2.CALL_STATE_AWAITING_APPROVAL,
    arguments_json=b'{"to":"ann@example.com"}',
    approval=call_pb2.ApprovalRequest(digest="d" * 64),
)
ASKED = call_pb2.Call(
    run_id="run_1",
    call_id="call_2",
    state=call_pb2.CALL_STATE_ASKED,
    question=call_pb2.Question(question="When?", options=["Today", "Tomorrow"]),
)


@pytest.mark.parametrize("line", ["a", "A", " yes ", "approve"])
def test_an_approval_carries_the_digest_that_was_shown(line: str) -> None:
    """HITL-3."""
    decision = answers.decision_of(line, GATED)
    assert decision.kind == call_pb2.DECISION_KIND_APPROVE
    assert (decision.run_id, decision.call_id, decision.digest) == ("run_1", "call_1", "d" * 64)


def test_new_arguments_go_as_they_were_typed() -> None:
    decision = answers.decision_of('e {"to": "bob@example.com"}', GATED)
    assert decision.kind == call_pb2.DECISION_KIND_EDIT
    assert decision.arguments_json == b'{"to": "bob@example.com"}'


@pytest.mark.parametrize("line", ["e {", 'e {"a": 1, "a": 2}', "e [1]", "e 1", "", "x", "t", "maybe"])
def test_what_decides_nothing_is_refused_with_what_would(line: str) -> None:
    with pytest.raises(answers.Unclear):
        answers.decision_of(line, GATED)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        *((word, call_pb2.DECISION_KIND_APPROVE) for word in ("Y", "YES", "\ta ", "s", "Series")),
        *((word, call_pb2.DECISION_KIND_REJECT) for word in ("n", " NO ", "R", "reject", "No: not before noon")),
        *(
            (sentence, None)
            for sentence in (
                "a different account please",
                "A moment, I have to ask",
                "yes but to the other account",
                "y tho?",
                "y.",
                "y: go",
                "Approve? Never",
                "s is for small",
                "series of what?",
                "no problem, do it",
                "n/a",
                "r u sure?",
                "reject the other one, not this one",
                "t shirts only",
                "edit the amount",
                "all of them",
                "always ask me",
            )
        ),
    ],
)
def test_only_a_bare_word_approves_or_rejects(line: str, kind: int | None) -> None:
    call = call_pb2.Call()
    call.CopyFrom(GATED)
    call.approval.series.digest = "e" * 64
    if kind is None:
        with pytest.raises(answers.Unclear):
            answers.decision_of(line, call)
    else:
        assert answers.decision_of(line, call).kind == kind


def test_an_unclear_answer_is_told_which_answers_exist() -> None:
    with pytest.raises(answers.Unclear, match=r"\[a\]pprove, \[e\]dit \[JSON\], \[r\]eject"):
        answers.decision_of("yes but to the other account", GATED)


def test_a_rejection_takes_the_reason_along() -> None:
    decision = answers.decision_of("r: not before noon", GATED)
    assert (decision.kind, decision.reason) == (call_pb2.DECISION_KIND_REJECT, "not before noon")


def test_a_text_can_stand_for_the_result_of_a_gated_call() -> None:
    decision = answers.decision_of("t: I wrote to her myself", GATED)
    assert (decision.kind, decision.answer) == (call_pb2.DECISION_KIND_ANSWER, "I wrote to her myself")


@pytest.mark.parametrize(("line", "answer"), [("2", "Tomorrow"), ("3", "3"), ("0", "0"), ("next week", "next week")])
def test_a_question_is_answered_by_number_or_in_words(line: str, answer: str) -> None:
    """HITL-1."""
    decision = answers.decision_of(line, ASKED)
    assert (decision.kind, decision.answer) == (call_pb2.DECISION_KIND_ANSWER, answer)


def test_the_editor_gets_the_arguments_and_gives_the_new_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nsed -i s/ann/bob/ $1\n")
    editor.chmod(0o700)
    monkeypatch.setenv("VISUAL", str(editor))
    decision = answers.decision_of("e", GATED)
    assert b"bob@example.com" in decision.arguments_json


def test_an_editor_that_does_not_work_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", "/no/such/editor")
    with pytest.raises(answers.Unclear, match="set EDITOR"):
        answers.decision_of("e", GATED)


@pytest.mark.parametrize(("typed", "given"), [("1", ASKED.question.options[0]), ("0", "0"), ("99", "99"), ("x", "x")])
def test_an_option_is_chosen_by_its_number_on_the_command_line_too(typed: str, given: str) -> None:
    assert answers.chosen(typed, ASKED) == given
