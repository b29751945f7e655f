"""Steps of a drive: attempts, sizes, titles, faults, and model calls that start before their step is committed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

import pytest

from pawl.agent_loop.loop.drive import Drive
from pawl.agent_loop.loop.ports import CallContext
from pawl.agent_loop.loop.rules.call import CallResult
from pawl.agent_loop.loop.rules.fact import (
    TAKEOVER,
    Cancel,
    OutputDelta,
    RoundRetrying,
    RoundStarted,
    Steer,
    ToolResult,
)
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.run import FailureClass, RunFailure, RunOptions, Undo
from pawl.agent_loop.loop.rules.tool import ExecutionPiece
from pawl.agent_loop.model.shared import CountedCall
from pawl.agent_loop.titles.titles import SECONDS_MAX, TitleMaker
from pawl.chassis.ids import RunId, RunKey
from pawl.errors import DependencyUnavailable, InboxChanged, Internal, LeaseLost, Overloaded, PawlError
from pawl.event.v1 import run_pb2
from pawl.job.v1.ledger_pb2 import CommitRunRequest
from pawl.job.v1.models_pb2 import TakeModelCallResponse
from pawl.job.v1.titles_pb2 import ClaimTitlesRequest, ClaimTitlesResponse, SetTitleRequest, SetTitleResponse, TitleTask
from pawl.values import CallState, Execution, RunState, StopCause
from tests.fakes.loop_world import CountingMeter, World, logged_states, transient
from tests.fakes.manual_clock import VirtualClock, run_in_virtual_time
from tests.fakes.model import FakeModel, Script, calls, fails, says
from tests.tables import for_each
from tests.unit.agent_loop.scenario import VERDICTS, at_each, check_whole, everything, present, shown_text

# The attempt count that the registry receives.


@pytest.mark.parametrize(("error", "earlier"), [(DependencyUnavailable, 1), (Internal, 1), (Overloaded, 0)])
async def test_a_lost_execution_counts_as_an_attempt_but_a_refused_one_does_not(
    error: type[PawlError], earlier: int
) -> None:
    """The registry remembers executions that it may have started."""

    world = World(VERDICTS, [calls("look")])
    registry, lost = world.registry, list[Execution]()
    perform = registry.execute

    async def execute(context: CallContext, execution: Execution) -> AsyncGenerator[ExecutionPiece, None]:
        if not lost:
            lost.append(execution)
            raise error
        async for piece in perform(context, execution):
            yield piece

    registry.execute = execute  # type: ignore[method-assign]
    await world.finish(world.ledger.submit("hello"))
    assert [execution.earlier_attempts for execution in (*lost, *registry.asked)] == [0, earlier]


# No step exceeds the size that the ledger accepts, however full the inbox is.


LARGEST = 1024 * 1024
CALLS = 20
# Payload limit of one step, with room for its last item and names.
BYTES_MAX = 4 * LARGEST


async def waiting(arguments_bytes: int = 10) -> tuple[World, RunKey]:
    asked = [f'show {{"n":{number},"text":"{"x" * arguments_bytes}"}}' for number in range(CALLS)]
    world = World(VERDICTS, [calls(*asked), says("Done.")])
    key = world.ledger.submit("hello")
    await world.drive()
    world.ledger.steps.clear()
    return world, key


def size(step: CommitRunRequest) -> int:
    results = sum(len(call.result.content_json) for call in step.calls)
    arguments = sum(len(call.arguments_json) for call in step.calls)
    return results + arguments + sum(len(message.text) for message in step.messages) + len(step.loop_state)


async def test_a_large_inbox_is_split_into_several_steps() -> None:
    world, key = await waiting()
    content = b'"%s"' % (b"x" * (LARGEST - 2))
    for call in world.ledger.calls(key):
        await world.ledger.send(key, ToolResult(call_id=call.call_id, result=CallResult(content_json=content)))
    for _ in range(3):
        await world.ledger.send(key, Steer(text="y" * (LARGEST // 4)))

    await world.drive()

    states = {world.ledger.run(key).state, *(call.state for call in world.ledger.calls(key))}
    assert max(map(size, world.ledger.steps)) <= BYTES_MAX
    assert states == {RunState.COMPLETED, CallState.SUCCEEDED}
    assert [len(message.text) for message in world.ledger.messages(key)][-4:-1] == [LARGEST // 4] * 3


@for_each("failure", [None, RunFailure(failure_class=FailureClass.INTERNAL, reason="INTERNAL", message="broken")])
async def test_a_run_with_many_large_calls_is_ended_in_several_steps(failure: Any) -> None:
    world, key = await waiting(arguments_bytes=250 * 1024)
    if failure is None:
        await world.ledger.send(key, Cancel(cause=StopCause.USER))
    else:
        some = world.ledger.calls(key)[0]
        await world.ledger.send(key, ToolResult(call_id=some.call_id, result=CallResult(content_json=b"1")))
    await Drive(await world.claim(), world.dependencies, failure=failure).run()

    assert max(map(size, world.ledger.steps)) <= BYTES_MAX
    assert world.ledger.run(key).state is (RunState.FAILED if failure else RunState.CANCELLED)


# A model call may start while its step is being committed; its output is used only afterwards.


# Commit time of a step: much longer than the model takes.
_STEP_SECONDS = 5.0

TOKENS_PER_ANSWER = 15

Hook = Callable[[World, RunKey], Coroutine[Any, Any, None]]


def played(scripts: list[Script], check: Hook, *, at_step: int, hook: Hook) -> None:
    """Play a run whose step `at_step` (from 1) reaches the ledger late, after `hook` has run."""

    async def main() -> None:
        world = World(VERDICTS, scripts, seconds=0.01)
        world.registry.reads_at_once = True
        key = world.ledger.submit("hello")
        steps = 0

        async def fault(method: str, done: bool) -> None:
            nonlocal steps
            if method != "CommitRun" or done:
                return
            steps += 1
            if steps == at_step:
                await asyncio.sleep(_STEP_SECONDS)
                await hook(world, key)

        world.ledger.fault = fault
        await world.finish(key)
        await check(world, key)

    run_in_virtual_time(main())


def shown(world: World, key: RunKey) -> str:
    return "".join(event.text for event in world.ledger.events(key) if isinstance(event, OutputDelta))


@pytest.mark.parametrize("at_step", [1, 2])
def test_a_cancel_before_the_commit_discards_the_model_call(at_step: int) -> None:
    async def hook(world: World, key: RunKey) -> None:
        assert len(world.model.requests) == at_step
        await world.ledger.send(key, Cancel(cause=StopCause.USER))

    async def check(world: World, key: RunKey) -> None:
        assert world.ledger.run(key).state is RunState.CANCELLED
        assert len([event for event in world.ledger.events(key) if isinstance(event, RoundStarted)]) == at_step - 1
        assert "secret" not in shown(world, key)
        # The tokens were used all the same.
        assert (world.ledger.run(key).usage.model_calls, world.model.streaming) == (at_step, 0)

    scripts: list[Script] = [calls("look"), says("secret")]
    played(scripts[-1:] if at_step == 1 else scripts, check, at_step=at_step, hook=hook)


def test_a_refused_step_is_planned_again_with_a_new_model_call() -> None:
    async def hook(world: World, key: RunKey) -> None:
        await world.ledger.send(key, Steer(text="And the weather?"))
        raise InboxChanged

    async def check(world: World, key: RunKey) -> None:
        run = world.ledger.run(key)
        # The speculative request, then the one that replaced it.
        assert (run.state, len(world.model.requests)) == (RunState.COMPLETED, 3)
        assert ("weather" in str(world.model.requests[-1].messages), "forgotten" in shown(world, key)) == (True, False)
        assert (run.usage.model_calls, run.usage.total_tokens) == (3, 3 * TOKENS_PER_ANSWER)
        assert logged_states(world.ledger.log(key))[-1] == "COMPLETED"

    played([calls("look"), says("forgotten"), says("It rains.")], check, at_step=2, hook=hook)


class Ledger:
    def __init__(self, tasks: Sequence[TitleTask], *, refuses: type[Exception] | None = None) -> None:
        self.tasks = list(tasks)
        self.refuses = refuses
        self.brought: list[tuple[str, str, run_pb2.Usage]] = []

    async def ClaimTitles(self, request: ClaimTitlesRequest) -> ClaimTitlesResponse:
        claimed, self.tasks = self.tasks[: request.titles_max], self.tasks[request.titles_max :]
        return ClaimTitlesResponse(tasks=claimed)

    async def SetTitle(self, request: SetTitleRequest) -> SetTitleResponse:
        self.brought.append((request.conversation_id, request.text, request.usage))
        if self.refuses is not None:
            raise self.refuses
        return SetTitleResponse()


def task(conversation_id: str = "conv_0", model: str = "", store_id: str = "acme") -> TitleTask:
    return TitleTask(
        store_id=store_id,
        conversation_id=conversation_id,
        attempt=1,
        model=model,
        user_text="How warm is it?",
        answer_text="12 degrees.",
    )


TASKS = [task(conversation_id=f"conv_{number}") for number in range(6)]


class CountedTitles:
    """Allows the calls of all stores but one, and counts tokens."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()

    async def take(self, _model_call_id: str, call: CountedCall) -> TakeModelCallResponse:
        self.tokens[call.store_id] += call.tokens
        return TakeModelCallResponse(wait_seconds=5 if call.store_id == "full" else 0)

    def used(self, _model_call_id: str, call: CountedCall) -> None:
        self.tokens[call.store_id] += call.tokens


async def made(ledger: Ledger, *scripts: Script, shared: Any = None) -> FakeModel:
    """Make titles for the tasks of the ledger, and return the model that wrote them."""
    stub: Any = ledger
    counted: Any = shared or CountedTitles()
    model = FakeModel(list(scripts))
    maker = TitleMaker(stub, model, counted, clock=VirtualClock(), meter=CountingMeter(), default_model="default")
    loop = asyncio.create_task(maker.run())
    await asyncio.sleep(5 * SECONDS_MAX)
    assert not loop.done()
    loop.cancel()
    return model


async def test_the_model_that_answered_writes_the_title_from_what_it_saw() -> None:
    ledger = Ledger([task(model="steady"), task()])
    asked, other = (await made(ledger, says("Warmth"), says("Warmth"))).requests
    assert (asked.model, other.model, asked.tools) == ("steady", "default", ())
    assert (asked.output_tokens_max, [message["role"] for message in asked.messages]) == (512, ["system", "user"])
    assert asked.messages[1]["content"] == "User: How warm is it?\n\nAssistant: 12 degrees."
    used = run_pb2.Usage(input_tokens=10, output_tokens=5, model_calls=1)
    assert ledger.brought == [("conv_0", "Warmth", used)] * 2


async def test_titles_count_toward_the_limits_per_minute() -> None:
    shared, ledger = CountedTitles(), Ledger([task("full", store_id="full"), task()])
    model = await made(ledger, says("Warmth"), shared=shared)
    assert ([each for each, _, _ in ledger.brought], len(model.requests)) == (["conv_0"], 1)
    assert shared.tokens[task().store_id] == 15


@pytest.mark.parametrize("script", [fails(), fails(after=says("Half a ti")[:1]), [2 * SECONDS_MAX]])
async def test_a_failing_model_leaves_the_title_unset_and_does_not_block_others(script: Script) -> None:
    ledger = Ledger(TASKS)
    await made(ledger, script, *[says("Warmth")] * 5)
    assert sorted(text for _, text, _ in ledger.brought) == ["", *["Warmth"] * 5]


@pytest.mark.parametrize("error", [DependencyUnavailable, ValueError])
async def test_a_title_that_cannot_be_stored_does_not_block_others(error: type[Exception]) -> None:
    ledger = Ledger(TASKS, refuses=error)
    await made(ledger)
    assert len(ledger.brought) == 6


@pytest.mark.parametrize("makes_titles", [False, True])
async def test_only_an_answered_run_requests_a_title(makes_titles: bool) -> None:
    world = World(VERDICTS, [says("Done."), fails(retryable=False)])
    world.dependencies = dataclasses.replace(world.dependencies, makes_titles=makes_titles)
    first = world.ledger.submit("hello")
    await world.finish(first)
    assert [step.asks_title for step in world.ledger.steps][-1] is makes_titles
    assert sum(step.asks_title for step in world.ledger.steps) == makes_titles
    before = len(world.ledger.steps)
    await world.finish(world.ledger.submit("fail"))
    await world.finish(world.ledger.submit("undo", undo=Undo(run_id=RunId(first.run_id))))
    assert not any(step.asks_title for step in world.ledger.steps[before:])


# A drive despite faults of the network, the provider and the process.


@pytest.mark.parametrize("done", [False, True], ids=["before it is applied", "after it is applied"])
@pytest.mark.parametrize(
    "error", [DependencyUnavailable, Internal, LeaseLost], ids=["unavailable", "internal", "lease lost"]
)
def test_any_commit_may_fail_before_or_after_it_is_applied(error: type[PawlError], *, done: bool) -> None:
    """I2, I4, I5: naive retries fail on commits that were applied and then reported as failed."""

    async def main(position: int) -> bool:
        world = everything()
        key = world.ledger.submit("hello")
        world.ledger.fault = transient(error, at=[position], name="CommitRun", done=done)
        await world.finish(key)
        check_whole(world, key)
        return position < len(world.ledger.steps)

    at_each(main, more_than=8)


async def test_a_takeover_mid_stream_voids_the_output_shown_so_far() -> None:
    """EVT-2, I8: the next attempt starts the answer again."""

    world = World(VERDICTS, [[*says("Once upon a time", chunks=8)[:4], 60.0], says("The whole story.", chunks=4)])
    key = world.ledger.submit("hello")
    first = asyncio.create_task(world.drive("first"))
    await asyncio.sleep(2.0)
    assert shown_text(world, key, 1) == "Once upo"
    first.cancel()
    await asyncio.wait([first])

    await world.finish(key)

    assert shown_text(world, key, 1) == "The whole story."
    (retrying,) = [event for event in world.ledger.events(key) if isinstance(event, RoundRetrying)]
    assert (retrying.reason, retrying.model_attempt) == (TAKEOVER, 1)
    deltas = [event for event in world.ledger.events(key) if isinstance(event, OutputDelta)]
    assert {delta.model_attempt for delta in deltas} == {1, 2}


def fails_inside(world: World, *, until: float, name: str = "") -> None:
    """Answer ledger requests with INTERNAL until a time; with `name`, only those with this name."""

    async def fault(request: str, done: bool) -> None:
        if world.clock.now() < until and name in {"", request}:
            raise Internal

    world.ledger.fault = fault
    world.ledger.loads_along = False


@pytest.mark.parametrize("name", ["LoadRun", "CommitRun", "ListCommands"])
async def test_a_run_survives_two_minutes_of_internal_ledger_errors(name: str) -> None:
    """Such errors occur while a database is read-only after a failover."""

    world = everything()
    key = world.ledger.submit("hello")
    fails_inside(world, until=world.clock.now() + 120.0, name=name)
    await world.finish(key)
    check_whole(world, key)


async def test_a_run_that_never_reached_the_registry_says_so() -> None:
    world = everything()
    key = world.ledger.submit("hello", RunOptions(limits=Limits(run_timeout_seconds=20)))
    world.registry.unreachable = 10**6
    await world.finish(key)
    failure = present(world.ledger.run(key).failure)
    assert (failure.reason, "tool-registry is reachable" in failure.message) == ("RUN_TIMEOUT", True)
