"""Events and tokens that end the waits of workflow runs, and runs that are paused."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from pawl.agent_loop.api.inbox import Inbox
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.replies import Reply
from pawl.agent_loop.loop.rules.fact import Event, Pause
from pawl.agent_loop.workflows.executions import Executions
from pawl.agent_loop.workflows.reading import Graphs
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RequestId, RunKey, UserId
from pawl.errors import QueueFull
from pawl.job.v1 import ledger_pb2
from pawl.values import CallState, CommandOutcome, RunState, WaitKind
from tests.fakes.loop_world import USER, World
from tests.unit.agent_loop.scenario import at_work, end_of
from tests.unit.agent_loop.workflows.test_parts import world_of
from tests.unit.agent_loop.workflows.test_running import start


async def test_an_event_ends_a_wait_and_is_kept_if_it_arrives_early() -> None:
    nodes = {
        "first": {"kind": "wait", "event": "paid"},
        "second": {"kind": "wait", "event": "paid", "after": ["first"]},
        "answer": {"kind": "output", "value": ["${nodes.first.output.n}", "${nodes.second.output.n}"]},
    }
    world = world_of()
    key = start(world, nodes)
    for n in (1, 2):
        event = Event(name="paid", payload_json=json.dumps({"n": n}).encode())
        assert await world.ledger.send(key, event, f"event{n}") is CommandOutcome.ACCEPTED
        assert await world.ledger.send(key, event, f"event{n}") is CommandOutcome.DUPLICATE
    await world.finish(key)
    assert json.loads(world.ledger.run(key).output_json) == [1, 2]
    assert await world.ledger.send(key, Event(name="paid"), "late") is CommandOutcome.LATE


async def test_run_waits_for_an_event_until_its_timeout() -> None:
    nodes = {
        "paid": {"kind": "wait", "event": "paid", "timeout_seconds": 60, "on_error": "continue"},
        "answer": {"kind": "output", "value": "${nodes.paid.error.reason}"},
    }
    world = world_of()
    key = start(world, nodes)
    await world.drive()
    assert world.ledger.run(key).waits == (WaitKind.EVENT,)
    await world.drive()
    assert world.ledger.run(key).output_text == "NODE_TIMEOUT"


async def test_a_paused_run_does_not_start_nodes_until_it_is_resumed() -> None:
    nodes = {
        "a": {"kind": "tool", "tool": "work"},
        "b": {"kind": "tool", "tool": "work", "after": ["a"]},
    }
    world = world_of()
    key = start(world, nodes)
    async with at_work(world.worker()):
        await world.clock.sleep(0.5)
        await world.ledger.send(key, Pause())
        await world.clock.sleep(100.0)
        assert world.ledger.run(key).waits == (WaitKind.PAUSED,)
        assert len(world.ledger.calls(key)) == 1
        await world.ledger.send(key, Pause(resumes=True))
        await end_of(world, key)
    assert [call.state for call in world.ledger.calls(key)] == [CallState.SUCCEEDED] * 2


async def test_an_event_beyond_the_limit_is_refused_until_a_node_takes_an_event() -> None:
    world = world_of()
    nodes = {
        "pause": {"kind": "wait", "seconds": 60},
        "first": {"kind": "wait", "event": "paid", "after": ["pause"]},
        "second": {"kind": "wait", "event": "late", "after": ["first"]},
    }
    key = start(world, nodes)
    for n in range(100):
        assert await world.ledger.send(key, Event(name="paid"), f"event{n}") is CommandOutcome.ACCEPTED
        if n % 40 == 30:
            await world.drive()
    with pytest.raises(QueueFull):
        await sent(world, key, "late", "late")
    await world.drive()
    assert await world.ledger.send(key, Event(name="paid"), "event1") is CommandOutcome.DUPLICATE
    while world.ledger.run(key).waits != (WaitKind.EVENT,):
        await world.drive()
    assert await world.ledger.send(key, Event(name="late"), "late") is CommandOutcome.ACCEPTED
    await world.drive()
    assert world.ledger.run(key).state is RunState.COMPLETED


@pytest.mark.parametrize("name", ["late", "#second"])
async def test_an_awaited_event_is_accepted_once_even_beyond_the_limit(name: str) -> None:
    world = world_of()
    nodes = {"first": {"kind": "wait", "seconds": 60}, "second": {"kind": "wait", "event": "late"}}
    key = start(world, {**nodes, "third": {"kind": "wait", "event": "paid", "after": ["first"]}})
    await world.drive()
    for n in range(100):
        assert await world.ledger.send(key, Event(name="paid"), f"event{n}") is CommandOutcome.ACCEPTED
    for _ in range(2):
        reply = await sent(world, key, name, "late")
    assert reply.outcome == ledger_pb2.COMMAND_OUTCOME_DUPLICATE
    with pytest.raises(QueueFull):
        await sent(world, key, name, "later")
    await world.drive()
    with pytest.raises(QueueFull):
        await sent(world, key, name, "later")
    await world.finish(key)
    assert world.ledger.run(key).state is RunState.COMPLETED


async def sent(world: World, key: RunKey, name: str, event_id: str) -> Reply:
    ledger: Any = PublicLedger(world.ledger.channel)
    unused: Any = None
    inbox = Inbox(ledger=ledger, registry=unused, ids=world.ledger.ids, now=world.clock.monotonic)
    caller = Principal(store_id=key.store_id, user_id=UserId(USER))
    awaits = partial(Executions(ledger, Graphs(world.workflows)).awaits, caller, key.run_id, name)
    return await inbox.send_event(caller, RequestId(event_id), key.run_id, ledger_pb2.EventCommand(name=name), awaits)
