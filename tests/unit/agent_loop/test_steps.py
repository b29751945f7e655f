"""Commands that are read together, steps that depend on the end of the log, and limits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules import planning, step
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.decision import StopCalls
from pawl.agent_loop.loop.rules.fact import Cancel, Command, CommandKind, Decide, Resolve, Steer, ToolResult
from pawl.agent_loop.loop.rules.limits import CEILINGS, OF_TOOLS, DeploymentLimits, Limits, read_limits
from pawl.agent_loop.loop.rules.message import Message, Role
from pawl.agent_loop.loop.rules.run import RunOptions, UnknownOutcomePolicy
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.settings import AgentLoopSettings
from pawl.chassis.ids import CommandId, RunId, UserId
from pawl.chassis.process.start import StartError
from pawl.errors import InvalidField
from pawl.event.v1 import run_pb2
from pawl.values import CallResolution, CallState, DecisionKind, RunState, StopCause
from tests.tables import for_each
from tests.unit.agent_loop.simulation import ASKS, UNKNOWN, Simulation, answer, started


def with_commands(run: Simulation, *kinds: CommandKind) -> State:
    commands = tuple(
        Command(command_id=CommandId(f"cmd_{number}"), user_id=UserId("u"), time=run.now, kind=kind)
        for number, kind in enumerate(kinds)
    )
    return replace(run.base, commands=commands)


@pytest.mark.parametrize(
    ("tool_name", "command"),
    [
        ("front", lambda call_id: ToolResult(call_id=call_id, result=CallResult(content_json=b'"seen"'))),
        ("ask", lambda call_id: Decide(call_id=call_id, kind=DecisionKind.ANSWER, answer="blue")),
    ],
)
def test_an_acknowledged_decision_counts_despite_an_earlier_message(
    tool_name: str, command: Callable[[str], CommandKind]
) -> None:
    """I1: a receipt is final, even if the worker reads the decision together with an earlier message."""
    run = started((tool_name,))
    [call] = run.calls

    run.sends(Steer(text="never mind"), command(call.call_id))

    assert run.base.calls[call.call_id].state is CallState.SUCCEEDED


@pytest.mark.parametrize(("last_output_seq", "after_seq"), [(7, None), (8, 7)])
def test_a_step_that_refers_to_its_own_events_requires_a_log_position(
    last_output_seq: int, after_seq: int | None
) -> None:
    """EVT-1: if another writer adds an event first, the step is planned again."""
    base = Simulation([answer()]).base
    base = replace(base, run=replace(base.run, last_seq=7))
    message = Message(
        role=Role.ASSISTANT, run_id=RunId("r"), text="hi", first_output_seq=7, last_output_seq=last_output_seq
    )

    assert step.between(base, replace(base, messages=(*base.messages, message)), ()).after_seq == after_seq


def test_a_call_approved_just_before_the_stop_is_withdrawn() -> None:
    """I3, I12: the ledger would refuse every step that starts the call, so the run would never end."""
    run = started(("parallel", "gated"))
    running, gated = run.calls
    approve = Decide(call_id=gated.call_id, kind=DecisionKind.APPROVE)
    planned = planning.plan(with_commands(run, approve, Cancel(cause=StopCause.USER)), (), run.now)
    assert planned.state.calls[gated.call_id].state is CallState.CANCELLED
    assert planned.work == (StopCalls(call_ids=(running.call_id,)),)


def test_a_call_that_should_run_again_is_withdrawn_if_the_run_is_stopped() -> None:
    """I3, I12: the step that moves a call must also consume the command."""
    run = started(("serial",), options=RunOptions(unknown_outcome_policy=UnknownOutcomePolicy.NEEDS_ATTENTION))
    [call] = run.calls
    run.ends(call.call_id, UNKNOWN)
    again = Resolve(call_id=call.call_id, resolution=CallResolution.RUN_AGAIN)

    planned = planning.plan(with_commands(run, again, Cancel(cause=StopCause.USER)), (), run.now)

    assert planned.state.calls[call.call_id].state is CallState.CANCELLED


# Tools that ask a question while running.


def asking() -> tuple[Simulation, Call]:
    """Return a run and its serial call, whose tool asks a question."""
    run = started(("serial",))
    run.ends(run.calls[0].call_id, ASKS)
    return run, run.calls[0]


def test_a_tool_that_asks_parks_the_run_until_each_answer() -> None:
    run, call = asking()
    assert (call.state, call.question, run.parked) == (CallState.ASKED, ASKS.question, True)
    run.decides(call, DecisionKind.ANSWER)
    run.ends(call.call_id, ASKS)
    run.decides(call, DecisionKind.REJECT)
    answers = run.base.loop.answers[call.call_id]
    assert [(given.answer, given.declined) for given in answers] == [("yes", False), ("", True)]
    run.ends(call.call_id)
    assert (run.calls[0].state, run.started) == (CallState.SUCCEEDED, [call.call_id] * 3)


@pytest.mark.parametrize("is_steered", [False, True])
def test_a_tool_question_that_expires_or_is_withdrawn_by_steering_counts_as_declined(*, is_steered: bool) -> None:
    run, call = asking()
    if is_steered:
        run.steers()
    else:
        run.passes(run.options.limits.answer_timeout_seconds)
    assert (run.base.loop.answers[call.call_id][-1].declined, call.call_id in run.under_way) == (True, True)
    run.ends(call.call_id)
    assert run.calls[0].state is CallState.SUCCEEDED


@for_each("is_answered", [False, True])
def test_cancelling_a_run_stops_a_tool_that_waits_for_an_answer_or_just_got_one(is_answered: bool) -> None:
    run, call = asking()
    cancel = Cancel(cause=StopCause.USER)
    given = Decide(call_id=call.call_id, kind=DecisionKind.ANSWER, answer="yes")
    run.sends(given, cancel) if is_answered else run.sends(cancel)
    assert (run.started, run.run.state) == ([call.call_id], RunState.CANCELLED)
    assert run.calls[0].state is CallState.CANCELLED


def test_an_unknown_enum_value_is_an_error() -> None:
    message = run_pb2.Run.FromString(run_pb2.Run(run_id="run_1", state=run_pb2.RUN_STATE_RUNNING).SerializeToString())
    message.MergeFromString(b"\x28\x63")  # Field 5, the state: 99.
    with pytest.raises(ValueError, match="99"):
        wire.RUN.read(message)


# Defaults apply to unset limits; ceilings bound requested ones.


@for_each(("own", "held"), [(0, 10), (5, 5), (99, 99), (600, 100)])
def test_a_tool_timeout_applies_up_to_the_ceiling(own: int, held: int) -> None:
    assert Limits().seconds_of_tool(own) == held


def test_timeouts_that_tools_set_are_limited_only_by_the_ceiling_of_the_run() -> None:
    asked = Limits().with_asked({"tool_timeout_seconds": 5}, CEILINGS)
    assert (asked.seconds_of_tool(0), asked.seconds_of_tool(99)) == (5, 99)
    narrow = Limits().with_asked({"tool_timeout_seconds_max": 5}, CEILINGS)
    assert (narrow.seconds_of_tool(0), narrow.seconds_of_tool(99)) == (5, 5)


@for_each("name", [*sorted(set(Limits.__struct_fields__) - {"total_tokens_max", "topped_up_tokens_max"})])
def test_a_run_may_set_each_limit_up_to_its_ceiling(name: Any) -> None:
    ceiling = getattr(CEILINGS, name)
    assert ceiling >= getattr(Limits(), name)
    assert getattr(Limits().with_asked({name: ceiling}, CEILINGS), name) == ceiling
    with pytest.raises(InvalidField, match=f"{name} must be at most"):
        Limits().with_asked({name: ceiling + 1}, CEILINGS)


def test_a_deployment_sets_limits_and_ceilings() -> None:
    found = read_limits(
        {
            "defaults": {"rounds_max": 20, "total_tokens_max": 9, "approvals_required": 2, "background": "off"},
            "ceilings": {"rounds_max": 50, "tool_timeout_seconds": 600, "total_tokens_max": 0},
        }
    )
    defaults, ceilings = found.defaults, found.ceilings
    assert (found.approvals_required, found.background, read_limits({})) == (2, "off", DeploymentLimits())
    assert (defaults.rounds_max, ceilings.rounds_max, ceilings.total_tokens_max) == (20, 50, 0)
    assert defaults.tool_timeout_seconds_max == ceilings.tool_timeout_seconds_max == 600
    assert isinstance(ceilings.tool_timeout_seconds, float)
    assert ceilings.run_timeout_seconds == CEILINGS.run_timeout_seconds
    servers = {"eu": {"base_url": "https://eu.example/v1", "api_key_file": "/run/eu"}}
    assert read_limits({"model_servers": servers}).model_servers["eu"].api_key_file == "/run/eu"
    for wrong in ({"a b": servers["eu"]}, {"eu": {"base_url": "https://eu.example", "api_key": "sk"}}):
        with pytest.raises(ValueError, match="model_servers"):
            read_limits({"model_servers": wrong})


def test_a_ceiling_is_never_below_its_default() -> None:
    found = read_limits({"defaults": {"tool_timeout_seconds": 300, "total_tokens_max": 500}}).ceilings
    assert (found.tool_timeout_seconds, found.tool_timeout_seconds_max) == (300, 300)
    assert found.total_tokens_max == 500, "a budget is a ceiling unless the file sets another one"


def test_limits_match_the_operations_manual() -> None:
    """The manual lists all limits except those in OF_TOOLS."""
    manual = (Path(__file__).parents[3] / "docs/guides/operations.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \| (\S+) to (\S+) \|", manual, re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted({*Limits.__struct_fields__} - {*OF_TOOLS})
    for name, default, ceiling, least, most in rows:
        usual = DeploymentLimits()
        assert (f"{getattr(usual.defaults, name):.0f}", f"{getattr(usual.ceilings, name):.0f}") == (default, ceiling)
        for value in (float(least) - 1, float(most) + 1e9, "9", True, None):
            with pytest.raises(
                ValueError, match=rf"^defaults.{name} must be a (whole )?number between {least}.* and {most}"
            ):
                read_limits({"defaults": {name: value}})


def test_invalid_limits_are_all_reported_at_start(tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    file.write_text(
        """{"defaults": {"rounds_max": 0, "rounds": 20, "background": "yes", "identical_calls_max": 2.5},
            "ceilings": {"calls_per_round_max": 9, "tool_timeout_seconds_max": 9, "approvals_required": 3}}"""
    )
    with pytest.raises(ValidationError) as caught:
        AgentLoopSettings.model_validate({"service_key": "s" * 32, "model": "m", "PAWL_LIMITS_FILE": str(file)})
    (problem,) = caught.value.errors()
    assert problem["msg"].removeprefix("Value error, ").split("; ") == [
        "defaults.rounds_max must be a whole number between 1 and 1000, got 0",
        "defaults.rounds is not the name of a limit",
        "defaults.background must be on, tool or off, got 'yes'",
        "defaults.identical_calls_max must be a whole number between 2 and 1000, got 2.5",
        "ceilings.calls_per_round_max must be at least the default (20), got 9",
        "ceilings.tool_timeout_seconds_max is not the name of a limit",
        "ceilings.approvals_required is not the name of a limit",
    ]


def test_keys_of_model_servers_are_read_from_files(tmp_path: Path) -> None:
    file, key = tmp_path / "limits.json", tmp_path / "key"
    servers = {"eu": {"base_url": "https://eu.example/v1", "api_key_file": str(key)}}
    values = {"service_key": "s" * 32, "model": "m", "OPENAI_API_KEY": "sk-1", "PAWL_LIMITS_FILE": str(file)}
    file.write_text(json.dumps({"model_servers": servers}))
    settings = AgentLoopSettings.model_validate(values)
    with pytest.raises(StartError, match="cannot read the key"):
        settings.model_servers  # noqa: B018  # reads the files
    key.write_text("sk-2\n")
    default = ("https://api.openai.com/v1", "sk-1")
    assert settings.model_servers == {"": default, "eu": ("https://eu.example/v1", "sk-2")}
    file.write_text(json.dumps({"model_servers": {"eu": {"base_url": "eu"}}}))
    with pytest.raises(ValidationError, match=r"model_servers.eu.base_url must be a URL"):
        AgentLoopSettings.model_validate(values)


def test_an_unreadable_limits_file_prevents_the_start(tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    for content in ("[]", "{", '{"limits": {}}', '{"defaults": {"rounds_max": 1, "rounds_max": 2}}', None):
        file.write_text(content) if content is not None else file.unlink()
        with pytest.raises(ValidationError, match="PAWL_LIMITS_FILE"):
            AgentLoopSettings.model_validate({"service_key": "s" * 32, "model": "m", "PAWL_LIMITS_FILE": str(file)})
