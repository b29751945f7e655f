"""Empty and truncated answers, model outages, and fields that only the model server understands."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
import pytest

from pawl.agent_loop.loop.drive import DriveEnd
from pawl.agent_loop.loop.rules import retry
from pawl.agent_loop.loop.rules.fact import RoundRetrying, RoundStarted, Warned
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.message import Role
from pawl.agent_loop.loop.rules.options import AskedOptions, RunDefaults, complete
from pawl.agent_loop.loop.rules.run import FailureClass, RunOptions
from pawl.agent_loop.model.breaker import Breaker
from pawl.agent_loop.model.request import (
    ROUND_TIMEOUT,
    CallPiece,
    Finished,
    ModelError,
    ModelRequest,
    Piece,
    Problem,
    ProviderState,
    ReasoningPiece,
    TextPiece,
)
from pawl.chassis.ids import RunKey, StoreId
from pawl.errors import InvalidField
from pawl.job.v1.models_pb2 import ReportModelServerResponse
from pawl.values import CallState, RunState, WaitKind
from tests.fakes.loop_world import World
from tests.fakes.manual_clock import ManualClock, run_in_virtual_time
from tests.fakes.model import FakeModel, Script, fails, says
from tests.unit.agent_loop.scenario import VERDICTS, finished, present

NOTHING: Script = [ReasoningPiece(text="hm"), Finished(reason="stop")]
USED_UP: Script = [ReasoningPiece(text="hm"), Finished(reason="length")]


def played(*scripts: Script) -> tuple[World, RunKey]:
    return run_in_virtual_time(finished(VERDICTS, list(scripts)))


def end_of(world: World, key: RunKey) -> tuple[RunState, str]:
    run = world.ledger.run(key)
    return run.state, run.failure.message if run.failure else run.output_text


def reasons(world: World, key: RunKey, kind: type[RoundRetrying | Warned]) -> list[str]:
    return [event.reason for event in world.ledger.events(key) if isinstance(event, kind)]


@pytest.mark.parametrize("nothing", [NOTHING, [Finished(reason="stop")], [TextPiece(text=" \n"), *NOTHING]])
def test_an_empty_answer_is_retried_once(nothing: Script) -> None:
    world, key = played(nothing, says("Here I am."))
    assert end_of(world, key) == (RunState.COMPLETED, "Here I am.")
    assert reasons(world, key, RoundRetrying) == ["EMPTY_ANSWER"]


@pytest.mark.parametrize(
    ("nothing", "expected"),
    [
        (NOTHING, "The model's answer had neither text nor a call."),
        (USED_UP, "The model reached its output limit before it produced any text or call."),
    ],
)
def test_the_run_fails_with_a_clear_message_after_a_second_empty_answer(nothing: Script, expected: str) -> None:
    world, key = played(nothing, nothing, says("too late"))
    assert (len(world.model.requests), *end_of(world, key)) == (2, RunState.FAILED, expected)


def test_a_truncated_answer_is_reported_to_the_user_and_to_the_model() -> None:
    cut: list[Piece] = [TextPiece(text="Once upon"), Finished(reason="length")]
    world, key = played(cut)
    assert end_of(world, key) == (RunState.COMPLETED, "Once upon")
    assert reasons(world, key, Warned) == ["ANSWER_CUT_OFF"]
    assert [message.interrupted for message in world.ledger.messages(key) if message.role is Role.ASSISTANT] == [True]


def test_a_truncated_call_explains_why_its_arguments_are_invalid() -> None:
    cut: list[Piece] = [
        CallPiece(index=0, call_id="a", name="look", arguments='{"n":1}'),
        CallPiece(index=1, call_id="b", name="look", arguments='{"n"'),
        Finished(reason="length"),
    ]
    world, key = played(cut, says("Done."))
    first, second = world.ledger.calls(key)
    assert (first.state, second.state) == (CallState.SUCCEEDED, CallState.FAILED)
    assert b"truncated by the output limit" in present(second.result).content_json


OUTAGE = Problem(reason="NETWORK", message="The model server cannot be reached.")


@pytest.mark.parametrize(
    ("seconds", "error", "tries", "state"),
    [
        (0.0, OUTAGE, 4, RunState.FAILED),
        (900.0, OUTAGE, 29, RunState.FAILED),
        (900.0, OUTAGE, 28, RunState.COMPLETED),
        (900.0, Problem(reason="HTTP_429", message="Later.", retry_after_seconds=300.0), 3, RunState.COMPLETED),
        (900.0, Problem(reason="HTTP_429", message="Later.", retry_after_seconds=3600.0), 1, RunState.FAILED),
        (900.0, Problem(reason="STREAM_TRUNCATED", message="It broke off."), 4, RunState.FAILED),
        (900.0, Problem(reason="HTTP_401", message="Who?", retryable=False), 1, RunState.FAILED),
    ],
)
def test_a_run_waits_visibly_for_the_model_server_while_parked(
    seconds: float, error: Problem, tries: int, state: RunState
) -> None:
    """LOOP-7: between quick retries, tries are up to a minute apart, and no worker holds the run."""

    async def main() -> None:
        failures = tries - 1 if state is RunState.COMPLETED else 100
        world = World(VERDICTS, [[ModelError(error)]] * failures + [says("Here I am.")])
        key = world.ledger.submit("hello", RunOptions(limits=Limits(provider_wait_seconds=seconds)))
        started_at, waited = world.clock.monotonic(), list[float]()
        while await world.drive() is DriveEnd.PARKED:
            run = world.ledger.run(key)
            assert (run.state, run.waits) == (RunState.WAITING, (WaitKind.PROVIDER,))
            (*_, last_retry) = (each for each in world.ledger.events(key) if isinstance(each, RoundRetrying))
            assert (last_retry.reason, last_retry.message) == (error.reason, error.message)
            waited.append(last_retry.delay_seconds)
        assert end_of(world, key)[0] is state
        assert len(world.model.requests) == tries
        assert max(waited, default=0) <= max(60.0, error.retry_after_seconds or 0.0)
        if state is RunState.FAILED and waited:
            assert world.clock.monotonic() - started_at == pytest.approx(seconds, abs=30)
            assert "cannot be reached" in end_of(world, key)[1]

    run_in_virtual_time(main())


def test_a_run_that_has_waited_for_the_model_server_survives_broken_answers() -> None:
    """LOOP-7: the failures before a wait do not use up the attempts after it."""

    async def main() -> None:
        errors = [OUTAGE] * 5 + [Problem(reason="STREAM_TRUNCATED", message="It broke off.")] * 3
        world = World(VERDICTS, [*([ModelError(each)] for each in errors), says("Here I am.")])
        key = world.ledger.submit("hello", RunOptions(limits=Limits(provider_wait_seconds=900.0)))
        while await world.drive() is DriveEnd.PARKED:
            pass
        assert end_of(world, key)[0] is RunState.COMPLETED

    run_in_virtual_time(main())


async def asked(breaker: Breaker, store: str = "acme", timeout_seconds: float = 30.0) -> str:
    messages = ({"role": "user", "content": "hi"},)
    request = ModelRequest(
        store_id=StoreId(store), model="m", messages=messages, headers_timeout_seconds=timeout_seconds
    )
    try:
        return "".join([piece.text async for piece in breaker.stream(request) if isinstance(piece, TextPiece)])
    except ModelError as error:
        return error.problem.reason


async def test_an_unresponsive_model_server_gets_one_probe_at_a_time() -> None:
    """LOOP-7: after ten failures in a row, only one call at a time tries the server.

    Refusals and rate limits count as answers.
    """
    rate = Problem(reason="HTTP_429", message="Later.", failure_class=FailureClass.RATE)
    answers = [OUTAGE, rate, *[OUTAGE] * 11, None, *[OUTAGE] * 9, None]
    clock = ManualClock()
    model = FakeModel([says("Here.") if each is None else [ModelError(each)] for each in answers])
    ask = partial(asked, Breaker(model, clock.monotonic))
    reasons = [await ask() for _ in range(14)]
    assert reasons == ["NETWORK", "HTTP_429", *["NETWORK"] * 10, *["PROVIDER_UNAVAILABLE"] * 2]
    for expected in ("NETWORK", "Here."):
        await clock.advance(10)
        assert await ask() == expected
    assert [await ask() for _ in range(10)] == [*["NETWORK"] * 9, "Here."]


async def test_processes_that_share_outages_stop_calling_together_and_one_of_them_tries_again() -> None:
    """LOOP-7. A process that gets no report from the others has a circuit of its own."""
    clock = ManualClock()
    outages, may_attempt, is_lost = 0, False, False

    async def report(*, answered: bool = False, **asked: float) -> ReportModelServerResponse | None:
        nonlocal outages
        outages = 0 if answered else outages + int(asked.get("outages", 0))
        if is_lost:
            return None
        return ReportModelServerResponse(outages=outages, closed_seconds=10, may_attempt=may_attempt)

    models = [FakeModel([[ModelError(OUTAGE)]] * 7 + [says("Here.")]), FakeModel([[ModelError(OUTAGE)]] * 3)]
    first, second = (Breaker(model, clock.monotonic, report) for model in models)
    assert [await asked(first) for _ in range(7)] == ["NETWORK"] * 7
    assert [await asked(second) for _ in range(4)] == [*["NETWORK"] * 3, "PROVIDER_UNAVAILABLE"]
    await clock.advance(10)
    assert await asked(second) == "PROVIDER_UNAVAILABLE", "another process makes the attempt"
    assert (await asked(first), outages) == ("Here.", 0)
    await clock.advance(10)
    models[1].scripts.append(says("Here too."))
    assert await asked(second) == "Here too."
    is_lost = True
    models[1].scripts.extend([[ModelError(OUTAGE)]] * 10)
    assert [await asked(second) for _ in range(11)] == [*["NETWORK"] * 10, "PROVIDER_UNAVAILABLE"]
    assert not may_attempt


async def test_no_store_can_make_a_healthy_server_unavailable_to_others() -> None:
    """A store chooses its timeouts, and its prompts may make the server fail. It may also cancel the next attempt."""
    clock, model = ManualClock(), FakeModel([])
    breaker = Breaker(model, clock.monotonic)

    async def fail(reason: str, times: int, timeout_seconds: float = 30.0) -> list[str]:
        model.scripts.extend([[ModelError(Problem(reason=reason, message=""))]] * times)
        return [await asked(breaker, "evil", timeout_seconds) for _ in range(times)]

    for reason, seconds in (("HEADERS_TIMEOUT", 29.0), ("ROUND_TIMEOUT", 30.0), ("HTTP_409", 30.0)):
        assert await fail(reason, 12, seconds) == [reason] * 12
    assert await fail("HTTP_500", 9) + await fail("HEADERS_TIMEOUT", 1) == [*["HTTP_500"] * 9, "HEADERS_TIMEOUT"]
    assert await asked(breaker, "evil") == "PROVIDER_UNAVAILABLE"
    await clock.advance(10)
    model.scripts.append([60.0])
    attempt = asyncio.create_task(asked(breaker, "evil", 600.0))
    await asyncio.sleep(0)
    attempt.cancel()
    assert await asked(breaker, "evil") == "PROVIDER_UNAVAILABLE"
    for reason in ("ROUND_TIMEOUT", "HEADERS_TIMEOUT"):
        await clock.advance(10)
        assert await fail(reason, 1, 1.0) == [reason], "the attempt before does not delay the next one"
        assert await asked(breaker, "evil") == "PROVIDER_UNAVAILABLE", "a short timeout is no answer"
    model.scripts.extend([says("Here.")] * 2)
    assert [await asked(breaker, store) for store in ("acme", "evil")] == ["Here."] * 2


@pytest.mark.parametrize("name", ["functions.look", "look()", "look<|channel|>commentary", " look{}", "tool:look"])
def test_a_decorated_tool_name_is_refused_with_a_suggestion(name: str) -> None:
    script: list[Piece] = [
        CallPiece(index=0, call_id="a", name=name, arguments="{}"),
        Finished(reason="tool_calls"),
    ]
    world, key = played(script, says("Done."))
    (call,) = world.ledger.calls(key)
    result = present(call.result)
    assert (result.error_reason, b"did you mean 'look'?" in result.content_json) == ("TOOL_NOT_FOUND", True)


# Models that fail permanently, and their fallbacks.


MODELS = ("first", "second", "third")
ASKS: list[Piece] = [
    ReasoningPiece(text="hm"),
    ProviderState(fields_json=b'{"reasoning_details":["seal"]}'),
    CallPiece(index=0, call_id="a", name="look", arguments="{}", fields_json=b'{"extra_content":"seal"}'),
    Finished(reason="tool_calls"),
]


def options(*models: str, attempts_max: int = 2) -> RunOptions:
    return RunOptions(model=models[0], model_fallbacks=models[1:], limits=Limits(model_attempts_max=attempts_max))


@pytest.mark.parametrize(
    ("failure_class", "left", "expected"),
    [
        (FailureClass.PROVIDER, 1.0, True),
        (FailureClass.RATE, 1.0, True),
        (FailureClass.RATE, 0.0, False),
        (FailureClass.AUTH, 1.0, False),
        (FailureClass.CONTENT_FILTER, 1.0, False),
        (FailureClass.LIMIT, 1.0, False),
    ],
)
def test_a_fallback_model_is_used_where_it_can_help(
    failure_class: FailureClass, left: float, *, expected: bool
) -> None:
    problem = Problem(reason=ROUND_TIMEOUT, message="", failure_class=failure_class)
    assert retry.falls_back(problem, fallbacks_left=1, left=left) is expected
    assert not retry.falls_back(problem, fallbacks_left=0, left=left)


def down(*models: str, otherwise: Script) -> World:
    world = World(VERDICTS, [])

    def reply(request: ModelRequest) -> Script:
        if request.model in models:
            return fails()
        return says("Done.") if any(message["role"] == "tool" for message in request.messages) else otherwise

    world.model.reply = reply
    return world


async def test_a_run_stays_with_its_fallback_model_to_the_end() -> None:
    world = down("first", otherwise=ASKS)
    key = world.ledger.submit("hello", options(*MODELS))
    await world.finish(key)
    run, events = world.ledger.run(key), world.ledger.events(key)
    assert (run.state, run.output_text) == (RunState.COMPLETED, "Done.")
    assert [request.model for request in world.model.requests] == ["first", "first", "second", "second"]
    assert [event.model for event in events if isinstance(event, RoundStarted)] == ["first", "second"]
    assert [event.model for event in events if isinstance(event, RoundRetrying)] == ["first", "second"]
    warnings = [event.message for event in events if isinstance(event, Warned)]
    assert (warnings, run.usage.model_calls) == (["The model first failed. The run continues with second."], 4)
    assert [message.model for message in world.ledger.messages(key)] == ["", "second", "second"]
    await world.finish(world.ledger.submit("and?", options(*MODELS), run.conversation_id))
    assert world.model.requests[4].model == "first", "another run starts with the first model"


async def test_opaque_fields_of_a_failed_model_are_not_sent_to_another_model() -> None:
    """The switch happens during a run, and the second model accepts a history with calls of the first."""

    world, key = await finished(
        VERDICTS, [ASKS, fails(retryable=False), says("Done.")], options=options("first", "second")
    )
    assert world.ledger.run(key).output_text == "Done."
    own, others = (msgspec.json.encode(request.messages) for request in world.model.requests[1:])
    assert (own.count(b'"seal"'), b'"reasoning_content":"hm"' in own) == (2, True)
    assert (b"seal" in others, b'"reasoning_content":""' in others) == (False, True), "servers may require the field"


def test_duplicate_model_fallbacks_are_dropped_and_invalid_ones_are_refused() -> None:
    defaults = RunDefaults(model="m")
    assert complete(AskedOptions(model_fallbacks=("a", "b", "a")), defaults).model_fallbacks == ("a", "b")
    for wrong in (("",), ("x" * 300,), tuple("abcde")):
        with pytest.raises(InvalidField, match="model"):
            complete(AskedOptions(model_fallbacks=wrong), defaults)
