"""A drive over the real rules of the ledger, with every fault that a network and a crash can bring."""

from __future__ import annotations

import asyncio
import itertools
import json
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any

import pytest

from services.agent_loop.app.drive import Drive, Left
from services.agent_loop.app.ports import RunKey
from services.agent_loop.domain.call import CallResult, CallState, Question
from services.agent_loop.domain.command import CallResolution, Cancel, Resolve, Steer
from services.agent_loop.domain.event import TAKEOVER, OutputDelta, RoundRetrying, RoundStarted, ToolProgress
from services.agent_loop.domain.limits import Limits
from services.agent_loop.domain.message import Role
from services.agent_loop.domain.model import ModelRequest
from services.agent_loop.domain.run import RoundLimitPolicy, RunOptions, RunState, StopCause, UnknownOutcomePolicy
from services.agent_loop.domain.tool import Verdict
from services.errors import DependencyUnavailable, LeaseLost, PawlError
from tests.fakes import virtual_time
from tests.fakes.ledger import transient
from tests.fakes.loop_world import World
from tests.fakes.model import calls, fails, says
from tests.fakes.registry import tool

DIGEST = "d" * 64
VERDICTS: dict[str, Verdict] = {
    "write": tool(),
    "look": tool(effect="READ_ONLY"),
    "mail": tool("APPROVE", digest=DIGEST),
    "show": tool("OFFER", context="FRONTEND"),
    "ask": tool("ASK", context="HUMAN", question=Question(question="Which colour?")),
}


def everything() -> World:
    """A conversation with a call of every kind, over three rounds."""
    world = World(
        VERDICTS,
        [
            calls('write {"n":1}', 'look {"n":1}', 'mail {"n":1}', 'show {"n":1}', text="Let me see."),
            calls('ask {"n":1}', 'write {"n":2}'),
            says("All is done.", chunks=30),
        ],
    )
    world.model.by_round = True
    return world


def check_whole(world: World, key: RunKey, *, state: RunState = RunState.COMPLETED) -> None:
    """What must hold of the record, whatever happened."""
    run, settled = world.ledger.run(key), world.ledger.calls(key)
    assert run.state is state
    assert all(call.settled and call.result is not None for call in settled)
    for call in settled:
        if call.tool_name in {"write", "mail"}:
            assert world.registry.effects[call.call_id] <= 1, "an effect happened twice"
            assert (call.state is CallState.SUCCEEDED) <= (world.registry.effects[call.call_id] == 1)
    seqs = [event.seq for event in world.ledger.book.events.rows if event.run_id == key.run_id]
    assert seqs == list(range(1, len(seqs) + 1))
    if state is RunState.COMPLETED:
        assert [call.state for call in settled] == [CallState.SUCCEEDED] * 6
        assert run.output_text == "All is done."
        rounds = [event.round for event in world.ledger.events(key) if isinstance(event, RoundStarted)]
        assert rounds == [1, 2, 3]


def shown_text(world: World, key: RunKey, round_number: int) -> str:
    """The text that a watcher sees of a round, with what was said to be void taken away."""
    shown: list[tuple[int, str]] = []
    for event in world.ledger.book.events.rows:
        if event.run_id != key.run_id:
            continue
        happening = world.ledger.events(key)[event.seq - 1]
        if isinstance(happening, OutputDelta) and happening.round == round_number:
            shown.append((event.seq, happening.text))
        if isinstance(happening, RoundRetrying) and happening.void_from_seq:
            shown = [(seq, text) for seq, text in shown if seq < happening.void_from_seq]
    return "".join(text for _, text in shown)


def test_a_run_goes_through_every_kind_of_call_to_its_answer() -> None:
    async def main() -> None:
        world = everything()
        key = world.ledger.submit("hello")

        await world.finish(key)

        check_whole(world, key)
        assert len(world.model.requests) == 3
        assert shown_text(world, key, 3) == "All is done."

    virtual_time.run(main())


def test_a_tool_round_costs_two_commits() -> None:
    """DESIGN 3."""

    async def main() -> None:
        world = World(VERDICTS, [calls('look {"n":1}', 'look {"n":2}'), says("Done.")])
        key = world.ledger.submit("hello")

        await world.finish(key)

        assert world.ledger.run(key).state is RunState.COMPLETED
        # Begin, answer with calls, results with the next round, first piece of the answer, end.
        assert len(world.ledger.steps) <= 6

    virtual_time.run(main())


def test_progress_of_a_tool_is_told() -> None:
    """TOOL-8."""

    async def main() -> None:
        world = World(VERDICTS, [calls("look")])
        world.registry.tells_progress = True
        key = world.ledger.submit("hello")

        await world.finish(key)

        (told,) = [event for event in world.ledger.events(key) if isinstance(event, ToolProgress)]
        assert (told.tool_name, told.fraction, told.message) == ("look", 0.5, "half")

    virtual_time.run(main())


def test_a_parked_run_holds_no_task() -> None:
    async def main() -> None:
        world = World(VERDICTS, [calls("ask")])
        world.ledger.submit("hello")
        before = asyncio.all_tasks()

        assert await world.drive() is Left.PARKED

        assert asyncio.all_tasks() == before

    virtual_time.run(main())


@pytest.mark.parametrize("done", [False, True], ids=["not carried out", "carried out"])
@pytest.mark.parametrize("error", [DependencyUnavailable, LeaseLost], ids=["unavailable", "lease lost"])
def test_any_commit_may_fail_whether_or_not_it_was_carried_out(error: type[PawlError], *, done: bool) -> None:
    """I2, I4, I5. "Executed, then reported as failed" is the case that naive retries get wrong."""

    async def main(position: int) -> bool:
        world = everything()
        key = world.ledger.submit("hello")
        world.ledger.fault = transient(error, at=[position], name="commit", done=done)
        await world.finish(key)
        check_whole(world, key)
        return position < len(world.ledger.steps)

    position = 0
    while virtual_time.run(main(position)):
        position += 1
    assert position > 8


def meanwhile(world: World, position: int, act: Callable[[], Awaitable[object]]) -> None:
    """Let something happen right before a commit reaches the ledger."""
    count = -1

    async def fault(name: str, done: bool) -> None:
        nonlocal count
        if name == "commit" and not done:
            count += 1
            if count == position:
                await act()

    world.ledger.fault = fault


def test_a_cancel_may_come_right_before_any_commit() -> None:
    """I12, C5: what is open is settled, nothing more is begun, the history stays valid."""

    async def main(position: int) -> bool:
        world = everything()
        key = world.ledger.submit("hello")
        meanwhile(world, position, lambda: world.ledger.send(key, Cancel(cause=StopCause.USER)))
        await world.finish(key)
        state = world.ledger.run(key).state
        check_whole(world, key, state=state)
        if state is RunState.CANCELLED:
            # The next run of the conversation is not refused by the provider.
            world.model.by_round = False
            world.model.scripts = [says("Hello again.")]
            world.ledger.fault = None
            later = world.ledger.submit("and now?", conversation_id=world.ledger.run(key).conversation_id)
            await world.finish(later)
            assert world.ledger.run(later).state is RunState.COMPLETED
        return state is RunState.CANCELLED

    position = 0
    while virtual_time.run(main(position)):
        position += 1
    assert position > 8


def test_a_message_may_enter_right_before_any_commit() -> None:
    """LOOP-13, C15: it is never lost, and enters at a closed batch."""

    async def main(position: int) -> bool:
        world = everything()
        key = world.ledger.submit("hello")
        receipts = []

        async def steer() -> None:
            receipts.append(await world.ledger.send(key, Steer(text="in blue, please")))

        meanwhile(world, position, steer)
        await world.finish(key)
        assert world.ledger.run(key).state is RunState.COMPLETED
        texts = [message.text for message in world.ledger.messages(key) if message.role is Role.USER]
        assert texts == (["hello", "in blue, please"] if receipts else ["hello"])
        return bool(receipts)

    position = 0
    while virtual_time.run(main(position)):
        position += 1
    assert position > 8


def dying(work: Coroutine[Any, Any, Left], dies: Iterator[bool]) -> Awaitable[Left]:
    """Step through `work`, from one wait to the next, and cancel it where `dies` says so."""

    @types.coroutine
    def stepping() -> Generator[Any, Any, Left]:
        steps = work.__await__()
        try:
            waited = next(steps)
            while True:
                try:
                    answer = yield waited
                except BaseException as error:  # noqa: BLE001  # given on to the work
                    waited = steps.throw(error)
                    continue
                waited = steps.throw(asyncio.CancelledError()) if next(dies) else steps.send(answer)
        except StopIteration as end:
            left: Left = end.value
            return left

    return stepping()


def test_a_worker_may_die_at_any_moment() -> None:
    """I5, I6, C9: another one goes on; nothing runs twice, nothing is shown twice."""

    async def main(moment: int) -> bool:
        world = everything()
        key = world.ledger.submit("hello")
        dies = (step == moment for step in itertools.count())
        died = False
        while not died and world.ledger.run(key).state is not RunState.COMPLETED:
            try:
                await dying(Drive(await world.claim("first"), world.shop).run(), dies)
            except asyncio.CancelledError:
                died = True
            await world.respond(key)
        await world.finish(key)
        check_whole(world, key)
        assert shown_text(world, key, 3) == "All is done."
        return died

    moment = 0
    while virtual_time.run(main(moment)):
        moment += 1
    assert moment > 30


def test_a_takeover_in_mid_stream_voids_what_was_shown() -> None:
    """EVT-2, I8."""

    async def main() -> None:
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

    virtual_time.run(main())


def test_a_call_is_asked_for_again_under_its_id_and_with_what_went_before() -> None:
    """I5: the registry tells by the id whether it ran."""

    async def main() -> None:
        world = World(VERDICTS, [calls("write")], seconds=5.0)
        key = world.ledger.submit("hello")
        first = asyncio.create_task(world.drive("first"))
        await asyncio.sleep(2.0)
        first.cancel()
        await asyncio.wait([first])

        await world.finish(key)

        (call,) = world.ledger.calls(key)
        asked = [(execution.call_id, execution.earlier_attempts) for execution in world.registry.asked]
        assert asked == [(call.call_id, 0), (call.call_id, 1)]
        assert world.registry.effects == {call.call_id: 1}

    virtual_time.run(main())


def test_a_long_history_is_summarised_and_the_run_goes_on() -> None:
    """LOOP-11: the summary is a model call of its own, and what it replaces is not sent any more."""

    async def main() -> None:
        options = RunOptions(limits=Limits(context_bytes_max=10_000, result_bytes_per_round_max=2_000, rounds_max=50))
        rounds = [calls(f'write {{"n":{n}}}') for n in range(12)]
        world = World(VERDICTS, [])
        world.registry.results["write"] = CallResult(content_json=json.dumps("x" * 5_000).encode())
        answers = iter([*rounds, says("All is done.")])
        world.model.reply = lambda request: says("In short.") if _is_summary(request) else next(answers)
        key = world.ledger.submit("hello", options)

        await world.finish(key)

        assert world.ledger.run(key).output_text == "All is done."
        summaries = [message for message in world.ledger.messages(key) if message.role is Role.SUMMARY]
        assert len(summaries) >= 2
        assert all(summary.text == "In short." for summary in summaries)
        sizes = [len(json.dumps(request.messages)) for request in world.model.requests if not _is_summary(request)]
        assert max(sizes) < 15_000
        assert "In short." in json.dumps(world.model.requests[-1].messages)
        # The summary's own output is no answer.
        assert not any(
            isinstance(event, OutputDelta) and "In short" in event.text for event in world.ledger.events(key)
        )

    virtual_time.run(main())


def _is_summary(request: ModelRequest) -> bool:
    return "Summarise" in str(request.messages[0]["content"])


def test_a_message_names_the_output_that_it_replaces() -> None:
    async def main() -> None:
        world = World(VERDICTS, [says("One two three four.", chunks=25)])
        key = world.ledger.submit("hello")

        await world.finish(key)

        events = world.ledger.events(key)
        places = [seq for seq, event in enumerate(events, 1) if isinstance(event, OutputDelta)]
        message = world.ledger.messages(key)[-1]
        assert (message.first_output_seq, message.last_output_seq) == (places[0], places[-1])

    virtual_time.run(main())


def test_a_cancel_stops_the_model_at_once_and_keeps_what_it_wrote() -> None:
    async def main() -> None:
        world = World(VERDICTS, [[*says("Once upon a time", chunks=4)[:2], 60.0]])
        key = world.ledger.submit("hello")
        claim = await world.claim()
        drive = Drive(claim, world.shop)
        running = asyncio.create_task(drive.run())
        await asyncio.sleep(5.0)
        assert world.model.streaming == 1

        await world.ledger.send(key, Cancel(cause=StopCause.USER))
        drive.poke()
        assert await running is Left.ENDED

        assert world.clock.now() < 1010
        assert world.model.streaming == 0
        run = world.ledger.run(key)
        assert (run.state, run.stop_cause, run.output_text) == (RunState.CANCELLED, StopCause.USER, "Once upo")
        message = world.ledger.messages(key)[-1]
        assert (message.text, message.interrupted) == ("Once upo", True)

    virtual_time.run(main())


def test_a_cancel_stops_running_tools_and_says_what_became_of_them() -> None:
    """C5, C11."""

    async def main() -> None:
        world = World(VERDICTS, [calls('write {"n":1}', 'look {"n":1}', 'write {"n":2}')], seconds=8.0)
        key = world.ledger.submit("hello")
        drive = Drive(await world.claim(), world.shop)
        running = asyncio.create_task(drive.run())
        await asyncio.sleep(3.0)
        assert world.registry.running == 2

        await world.ledger.send(key, Cancel(cause=StopCause.USER))
        drive.poke()
        await running

        assert world.registry.running == 0
        assert not world.registry.effects
        assert [call.state for call in world.ledger.calls(key)] == [CallState.CANCELLED] * 3
        assert len(world.registry.order) == 2

    virtual_time.run(main())


def test_an_approval_lets_its_call_start_while_siblings_run() -> None:
    """HITL-6."""

    async def main() -> None:
        world = World(VERDICTS, [calls('look {"n":1}', 'mail {"n":1}')], seconds=30.0)
        key = world.ledger.submit("hello", RunOptions())
        drive = Drive(await world.claim(), world.shop)
        running = asyncio.create_task(drive.run())
        await asyncio.sleep(3.0)

        await world.respond(key)
        drive.poke()
        await asyncio.sleep(1.0)

        assert world.registry.running == 2
        await running

    virtual_time.run(main())


def test_a_provider_failure_is_retried_with_growing_waits_and_then_fails_the_run() -> None:
    """LOOP-7, C11: one retry layer, four attempts."""

    async def main() -> None:
        broken = fails(after=says("Once upon", chunks=2)[:2])
        world = World(VERDICTS, [broken] * 6)
        key = world.ledger.submit("hello")
        began = world.clock.now()

        await world.finish(key)

        run = world.ledger.run(key)
        assert run.state is RunState.FAILED
        assert run.failure is not None
        assert (run.failure.reason, run.failure.failure_class) == ("PROVIDER_ERROR", "PROVIDER")
        assert run.output_text == "Once upon"
        assert len(world.model.requests) == 4
        retries = [event for event in world.ledger.events(key) if isinstance(event, RoundRetrying)]
        assert [retry.model_attempt for retry in retries] == [1, 2, 3]
        assert [retry.delay_seconds for retry in retries] == [0.75, 1.5, 3.0]
        assert world.clock.now() - began >= 5.25
        message = world.ledger.messages(key)[-1]
        assert (message.text, message.interrupted) == ("Once upon", True)

    virtual_time.run(main())


def test_what_a_failed_attempt_showed_is_replaced_and_never_doubled() -> None:
    async def main() -> None:
        world = World(VERDICTS, [fails(after=says("Once upon", chunks=2)[:2]), says("The end.")])
        key = world.ledger.submit("hello")

        await world.finish(key)

        assert shown_text(world, key, 1) == "The end."

    virtual_time.run(main())


def test_the_registry_may_be_away_for_a_while() -> None:
    async def main() -> None:
        world = everything()
        key = world.ledger.submit("hello")
        world.registry.unreachable = 3
        drive = asyncio.create_task(world.finish(key))
        await asyncio.sleep(0.5)
        world.registry.unreachable = 3

        await drive

        check_whole(world, key)

    virtual_time.run(main())


def test_the_run_time_limit_stops_the_work_itself() -> None:
    """LOOP-6, D4, C11: parked time does not count."""

    async def main() -> None:
        options = RunOptions(limits=Limits(run_timeout_seconds=20, tool_timeout_seconds=100))
        world = World(VERDICTS, [calls("ask"), calls("write")], seconds=90.0)
        key = world.ledger.submit("hello", options)
        await world.drive()
        await asyncio.sleep(1000)
        await world.respond(key)
        began = world.clock.now()

        await world.drive()

        run = world.ledger.run(key)
        assert run.failure is not None
        assert (run.state, run.failure.reason) == (RunState.FAILED, "RUN_TIMEOUT")
        assert 15 <= world.clock.now() - began <= 25
        assert world.registry.running == 0
        assert world.ledger.calls(key)[-1].state is CallState.CANCELLED

    virtual_time.run(main())


def test_a_run_that_needed_attention_may_fail_right_after_it_got_it() -> None:
    """D9: the resolved call was the last that the round limit allows."""

    async def main() -> None:
        options = RunOptions(
            limits=Limits(rounds_max=1),
            round_limit_policy=RoundLimitPolicy.FAIL,
            unknown_outcome_policy=UnknownOutcomePolicy.NEEDS_ATTENTION,
        )
        world = World(VERDICTS, [calls("write")])
        world.registry.forgets.add("write")
        key = world.ledger.submit("hello", options)
        assert await world.drive() is Left.PARKED
        assert world.ledger.run(key).state is RunState.NEEDS_ATTENTION
        (call,) = world.ledger.calls(key)

        await world.ledger.send(key, Resolve(call_id=call.call_id, resolution=CallResolution.TELL_MODEL))
        await world.drive()

        run = world.ledger.run(key)
        assert run.failure is not None
        assert run.failure.reason == "ROUND_LIMIT"

    virtual_time.run(main())


def test_handing_over_settles_nothing_and_loses_nothing() -> None:
    """OPS-5."""

    async def main(after: float) -> None:
        world = everything()
        key = world.ledger.submit("hello")
        drive = Drive(await world.claim("first"), world.shop)
        running = asyncio.create_task(drive.run())
        await asyncio.sleep(after)
        drive.hand_over()
        left = await running
        await world.ledger.release("first")

        if left is not Left.PARKED:
            assert left is Left.HANDED_OVER
        await world.respond(key)
        await world.finish(key)
        check_whole(world, key)

    for tenth in range(25):
        virtual_time.run(main(tenth / 10))
