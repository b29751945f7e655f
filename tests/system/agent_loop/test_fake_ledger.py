"""The ledger in memory that other tests use answers like the real one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

import grpc
import pytest

from pawl.agent_loop.adapters.public_ledger import LedgerClient
from pawl.agent_loop.app.public_ports import PublicLedger
from pawl.agent_loop.app.public_values import (
    Caller,
    CancelCommand,
    ClientSession,
    DecisionCommand,
    LeaseAnswer,
    MessagePolicy,
    NewMessage,
    PendingFilter,
    Reply,
    ResultCommand,
)
from pawl.agent_loop.domain import undo
from pawl.agent_loop.domain.call import DecisionKind
from pawl.agent_loop.domain.options import AskedOptions
from pawl.agent_loop.domain.run import RunOptions, StopCause, Undo
from pawl.errors import PawlError
from pawl.event.v1 import call_pb2
from tests.fakes.live_events import FakeLive
from tests.fakes.manual_clock import ManualClock
from tests.fakes.public_ledger import FakeLedger
from tests.system.agent_loop.worker import DIGEST, Worker

Observations = list[Any]


class Stage(Protocol):
    """A ledger with a worker."""

    ledger: PublicLedger
    me: Caller

    async def add_run(self) -> str: ...
    async def add_call(self, run_id: str, call_id: str, state: call_pb2.CallState.ValueType) -> None: ...
    async def settle(self, run_id: str, call_id: str, state: call_pb2.CallState.ValueType) -> None: ...
    async def finish(self, run_id: str) -> None: ...


class FakeStage:
    """The ledger in memory."""

    def __init__(self, clock: ManualClock, store_id: str) -> None:
        self.fake = FakeLedger(clock, FakeLive())
        self.ledger: PublicLedger = self.fake
        self.me = Caller(store_id=store_id, user_id="me")

    async def add_run(self) -> str:
        run_id = f"run_{len(self.fake.runs) + 1}"
        await self.fake.add_run(run_id, self.me, f"conv_{run_id}")
        return run_id

    async def add_call(self, run_id: str, call_id: str, state: call_pb2.CallState.ValueType) -> None:
        await self.fake.add_call(call_id, state, run_id=run_id)
        if state == call_pb2.CALL_STATE_AWAITING_APPROVAL:
            self.fake.runs[run_id].calls[call_id].approval.digest = DIGEST

    async def settle(self, run_id: str, call_id: str, state: call_pb2.CallState.ValueType) -> None:
        await self.fake.settle(call_id, state)

    async def finish(self, run_id: str) -> None:
        await self.fake.finish(run_id)


class RealStage:
    """A job store."""

    def __init__(self, channel: grpc.aio.Channel, worker: Worker) -> None:
        self.ledger: PublicLedger = LedgerClient(channel)
        self.me = Caller(store_id=worker.store_id, user_id="me")
        self.worker = worker
        self.add_run = worker.add_run
        self.add_call = worker.add_call
        self.settle = worker.settle
        self.finish = worker.finish


def seen(reply: Reply) -> tuple[str, str]:
    return (reply.outcome.value, reply.reason)


def lease(answer: LeaseAnswer) -> tuple[Any, ...]:
    call = answer.call
    return (answer.granted, answer.replaced, call and (call.state.value, call.holder_client_id, call.offer_epoch))


async def outcome(call: Awaitable[Any]) -> str:
    try:
        await call
    except PawlError as error:
        return error.reason
    return "OK"


def result(call_id: str, content: bytes = b"1", client_id: str = "", epoch: int = 0, by: str = "") -> ResultCommand:
    return ResultCommand(
        call_id=call_id, content_json=content, is_error=False, client_id=client_id, offer_epoch=epoch, session_id=by
    )


def decision(call_id: str, kind: DecisionKind, digest: str = DIGEST) -> DecisionCommand:
    return DecisionCommand(
        call_id=call_id, kind=kind, digest=digest, arguments_json=b"", edited_digest="", reason="", answer=""
    )


async def offers(stage: Stage) -> Observations:
    ledger, me = stage.ledger, stage.me
    run_id = await stage.add_run()
    await stage.add_call(run_id, "call_1", call_pb2.CALL_STATE_OFFERED)

    async def ask(client_id: str, session_id: str = "ses_1") -> tuple[Any, ...]:
        client = session(client_id, session_id)
        return lease(await ledger.lease_offer(me, run_id, "call_1", client=client, lease_seconds=30))

    async def send(command_id: str, command: ResultCommand) -> tuple[str, str]:
        return seen(await ledger.send_command(me, run_id, command_id, command))

    observations: Observations = [await ask("a"), await ask("a"), await ask("b")]
    observations.append([call.call_id for call in await ledger.renew_offers(me, session("a"), 30)])
    observations.append([call.call_id for call in await ledger.renew_offers(me, session("b"), 30)])
    observations.append(await ask("a", "ses_2"))
    observations.append([call.call_id for call in await ledger.renew_offers(me, session("a"), 30)])
    observations.append(await ask("a", "ses_1"))
    observations.append(await send("c0", result("call_1", client_id="a", epoch=1, by="ses_1")))
    await ledger.release_offers(me, session("a"), "")
    observations += [(await ledger.get_call(me, "call_1")).holder_client_id, await ask("a", "ses_3")]
    await ledger.release_offers(me, session("a", "ses_3"), "")
    await ledger.release_offers(me, session("a", "ses_3"), run_id)
    observations += [(await ledger.get_call(me, "call_1")).holder_client_id, await ask("b")]
    observations.append(await send("c1", result("call_1", client_id="a", epoch=1)))
    observations.append(await send("c2", result("call_1", client_id="b", epoch=1)))
    observations.append(await send("c3", result("call_1", client_id="b", epoch=2, by="ses_0")))
    observations.append(await send("c3", result("call_1", client_id="b", epoch=2, by="ses_1")))
    observations.append(await send("c3", result("call_1", client_id="b", epoch=2)))
    observations.append(await outcome(send("c3", result("call_1", b"2", client_id="b", epoch=2))))
    observations.append((await send("c4", result("call_1", b"2", client_id="b", epoch=2)))[0])
    return observations


async def results_without_a_stream(stage: Stage) -> Observations:
    ledger, me = stage.ledger, stage.me
    run_id = await stage.add_run()
    await stage.add_call(run_id, "call_1", call_pb2.CALL_STATE_OFFERED)
    await stage.add_call(run_id, "call_2", call_pb2.CALL_STATE_OFFERED)
    await stage.settle(run_id, "call_2", call_pb2.CALL_STATE_CANCELLED)
    observations: Observations = []
    for command_id, call_id in [("c1", "no-such"), ("c2", "call_2"), ("c3", "call_1"), ("c4", "call_1")]:
        reply = await ledger.send_command(me, run_id, command_id, result(call_id))
        observations.append((reply.outcome.value, reply.run and [call.call_id for call in reply.run.pending_calls]))
    return observations


async def decisions(stage: Stage) -> Observations:
    ledger, me = stage.ledger, stage.me
    run_id = await stage.add_run()
    await stage.add_call(run_id, "call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL)
    approve = DecisionKind.APPROVE
    steps = [
        ("d1", decision("call_1", approve, "")),
        ("d2", decision("call_1", approve, "cd" * 32)),
        ("d3", decision("no-such", approve)),
        ("d4", decision("call_1", approve)),
        ("d4", decision("call_1", approve)),
    ]
    return [seen(await ledger.send_command(me, run_id, command_id, command)) for command_id, command in steps]


async def the_end(stage: Stage) -> Observations:
    ledger, me = stage.ledger, stage.me
    run_id = await stage.add_run()
    await stage.add_call(run_id, "call_1", call_pb2.CALL_STATE_OFFERED)
    await stage.settle(run_id, "call_1", call_pb2.CALL_STATE_CANCELLED)
    before = await ledger.list_events(me, run_id, 0)
    await stage.finish(run_id)
    after = await ledger.list_events(me, run_id, before.last_seq)
    nothing = await ledger.list_events(me, run_id, after.last_seq)
    cancel = CancelCommand(cause=StopCause.USER, reason="")
    return [
        before.ended,
        [event.run_state and event.run_state.value for event in after.events],
        (after.ended, after.last_seq - before.last_seq),
        (nothing.events, nothing.ended),
        await outcome(ledger.list_events(me, run_id, after.last_seq + 1)),
        seen(await ledger.send_command(me, run_id, "c1", cancel)),
        lease(await ledger.lease_offer(me, run_id, "call_1", client=session("a"), lease_seconds=30))[0],
        (await ledger.get_run(me, run_id)).state.value,
    ]


def session(client_id: str, session_id: str = "ses_1") -> ClientSession:
    return ClientSession(client_id=client_id, session_id=session_id)


async def strangers(stage: Stage) -> Observations:
    ledger, me = stage.ledger, stage.me
    run_id = await stage.add_run()
    await stage.add_call(run_id, "call_1", call_pb2.CALL_STATE_OFFERED)
    observations: Observations = []
    for caller in [
        Caller(store_id=me.store_id, user_id="you"),
        Caller(store_id=f"{me.store_id}-2", user_id="me"),
    ]:
        observations += [
            await outcome(ledger.get_run(caller, run_id)),
            await outcome(ledger.get_call(caller, "call_1")),
            await outcome(ledger.list_events(caller, run_id, 0)),
            await outcome(ledger.list_calls(caller, run_id, page_size=0, page_token="")),
            seen(await ledger.send_command(caller, run_id, "c1", result("call_1"))),
            lease(await ledger.lease_offer(caller, run_id, "call_1", client=session("a"), lease_seconds=30)),
            (await ledger.list_pending(caller, PendingFilter(), page_size=0, page_token="")).items,
        ]
    return observations


async def messages(stage: Stage) -> Observations:
    ledger, me = stage.ledger, stage.me

    def message(request_id: str, text: str, conversation_id: str = "", **fields: Any) -> NewMessage:
        return NewMessage(
            asked=AskedOptions(),
            **{
                "request_id": request_id,
                "conversation_id": conversation_id,
                "conversation_must_exist": bool(conversation_id),
                "text": text,
                "options": RunOptions(model="m"),
                "policy": MessagePolicy.QUEUE,
                **fields,
            },
        )

    first, _ = await ledger.submit_message(me, message("r1", "Hello"))
    again, _ = await ledger.submit_message(me, message("r1", "Hello"))
    return [
        first.run_id == again.run_id,
        first.state.value,
        await outcome(ledger.submit_message(me, message("r1", "Bye"))),
        await outcome(ledger.submit_message(me, message("r2", "Hello", "no-such"))),
        await outcome(ledger.list_runs(me, page_size=0, page_token="x", conversation_id="", states=())),
    ]


async def undo_sources(stage: Stage) -> Observations:
    ledger, me = stage.ledger, stage.me
    undone, undoing = await stage.add_run(), await stage.add_run()
    await stage.add_call(undone, "call_1", call_pb2.CALL_STATE_OFFERED)
    await stage.settle(undone, "call_1", call_pb2.CALL_STATE_CANCELLED)
    await stage.add_call(undoing, undo.undo_call_id("call_2", 1), call_pb2.CALL_STATE_OFFERED)
    await stage.add_call(undone, "call_2", call_pb2.CALL_STATE_OFFERED)
    asked = Undo(run_id=undone, call_id="call_2", user_id="me")
    message = NewMessage(
        request_id="u1",
        conversation_id="",
        conversation_must_exist=False,
        text="[Undo]",
        asked=AskedOptions(),
        options=RunOptions(model="m"),
        policy=MessagePolicy.QUEUE,
        undo=asked,
    )
    run, _ = await ledger.submit_message(me, message)
    other = replace(message, undo=Undo(run_id=undone, user_id="me"))
    anybody = Caller(store_id=me.store_id, user_id="")
    found = await ledger.undo_sources(me, undone)
    return [
        [(source.call.call_id, source.call.state.value) for source in found],
        run.undo == asked,
        await outcome(ledger.submit_message(me, other)),
        (await ledger.get_run(anybody, undone)).user_id,
        await outcome(ledger.undo_sources(Caller(store_id=me.store_id, user_id="you"), undone)),
        await outcome(ledger.undo_sources(me, "no-such")),
    ]


@pytest.mark.parametrize(
    "script",
    [offers, results_without_a_stream, decisions, the_end, strangers, messages, undo_sources],
    ids=lambda each: each.__name__,
)
async def test_the_fake_ledger_answers_like_the_real_one(
    script: Callable[[Stage], Awaitable[Observations]],
    ledger_channel: grpc.aio.Channel,
    worker: Worker,
    clock: ManualClock,
    store_id: str,
) -> None:
    assert await script(FakeStage(clock, store_id)) == await script(RealStage(ledger_channel, worker))
