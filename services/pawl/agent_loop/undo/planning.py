"""Reads a run's calls from the ledger and plans their undo."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Final

import grpc
from msgspec.structs import replace

from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.ledger import calls_of_run
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.fact import Fact, RunRefused, ToolsPinned
from pawl.agent_loop.loop.rules.run import FailureClass, PinnedTool, Run, RunFailure
from pawl.agent_loop.loop.tool_calls import ToolCalls
from pawl.agent_loop.undo import rules as undo
from pawl.agent_loop.undo.rules import UndoSource
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.chassis.rpc.client import translated
from pawl.chassis.rpc.retry import Retry
from pawl.errors import CallNotFound, RunNotEnded, RunNotFound, ToolNotFound
from pawl.job.v1 import ledger_pb2, ledger_pb2_grpc
from pawl.values import ENDED, CallState

_READS_AT_ONCE_MAX: Final = 16
# How often and how long to wait for the runs below to end.
_WAITS_MAX: Final = 300
_WAIT_SECONDS: Final = 1.0


async def sources(
    channel: grpc.aio.Channel, store_id: StoreId, user_id: UserId, run_id: RunId, *, open_may_be_left: bool = True
) -> tuple[UndoSource, ...]:
    """Return a run's calls, each with the calls that tried to undo it, without result contents.

    The calls of a workflow or goal run include the calls of the runs below it. The deleted rounds of a job share one
    source, which contains their number. If a rerun reuses results of another run, a source refers to that run instead
    of its calls. Unless `open_may_be_left` is set, all runs below must have ended.

    Raises:
        RunNotFound: The user does not have this run.
        RunNotEnded: A run below it is still being stopped.
    """
    stub = ledger_pb2_grpc.LedgerServiceStub(channel)
    of_run = ledger_pb2.GetRunRequest(store_id=store_id, user_id=user_id, run_id=run_id)
    run = (await translated(stub.GetRun(of_run))).run
    trimmed = run.trimmed_rounds
    calls = await calls_of_run(channel, store_id, user_id, run_id, keep=undo.slim)
    has_program = run.HasField("workflow") or run.HasField("goal")
    below = [call.child_run_id for call in calls if undo.is_carried_out_below(call)] if has_program else []
    # The run's own call that each run below it carries out.
    tops = {call.child_run_id: call.call_id for call in calls if call.child_run_id}
    for child_run_id in below:
        of_child = ledger_pb2.GetRunRequest(store_id=store_id, user_id=user_id, run_id=child_run_id)
        if not open_may_be_left and (await translated(stub.GetRun(of_child))).run.state not in ENDED:
            raise RunNotEnded
        found_below = await calls_of_run(channel, store_id, user_id, child_run_id, keep=undo.slim)
        further = [call.child_run_id for call in found_below if undo.is_carried_out_below(call)]
        tops |= dict.fromkeys(further, tops[child_run_id])
        below += further
        calls += found_below
    slots = asyncio.Semaphore(_READS_AT_ONCE_MAX)

    async def source(call: Call) -> UndoSource:
        own = UndoSource(call=call, top_call_id=tops.get(call.run_id, call.call_id))
        if undo.inverse_of(call) is None:
            return own
        async with slots:
            return replace(own, attempts=await _attempts(stub, store_id, user_id, call.call_id))

    # The calls of a run below replace the call that the run carried out.
    own = (call for call in calls if call.child_run_id not in below)
    found = tuple(await asyncio.gather(*map(source, own)))
    if run.workflow.rerun_of_run_id:
        reused = Call(
            store_id=store_id,
            conversation_id=ConversationId(run.conversation_id),
            run_id=run_id,
            call_id=CallId(""),
            round=0,
            index=0,
            tool_name=run.workflow.name,
            state=CallState.SUCCEEDED,
        )
        found = (*found, UndoSource(call=reused, reused_run_id=RunId(run.workflow.rerun_of_run_id)))
    if not (trimmed and calls):
        return found
    # Put this source first, so that the undo reaches it last.
    like_them = replace(calls[0], call_id=CallId(""), round=0, end_time=None)
    return (UndoSource(call=like_them, trimmed_rounds=trimmed), *found)


async def _attempts(
    stub: ledger_pb2_grpc.LedgerServiceAsyncStub, store_id: StoreId, user_id: UserId, call_id: CallId
) -> tuple[Call, ...]:
    attempts: list[Call] = []
    for attempt in itertools.count(1):
        request = ledger_pb2.GetCallRequest(
            store_id=store_id, user_id=user_id, call_id=undo.undo_call_id(CallId(call_id), attempt)
        )
        try:
            response = await translated(stub.GetCall(request))
        except CallNotFound:
            break
        attempts.append(undo.slim(wire.CALL.read(response.call)))
    return tuple(attempts)


async def _read(channel: grpc.aio.Channel, run: Run, run_id: RunId, retry: Retry) -> tuple[UndoSource, ...]:
    """Read the run's calls once the runs below it have ended, or after a time limit.

    A call that is being stopped may still succeed.
    """
    for _ in range(_WAITS_MAX):
        with suppress(RunNotEnded):
            return await retry.until_answered(
                lambda: sources(channel, run.store_id, run.user_id, run_id, open_may_be_left=False)
            )
        await asyncio.sleep(_WAIT_SECONDS)
    return await retry.until_answered(lambda: sources(channel, run.store_id, run.user_id, run_id))


async def plan(run: Run, *, channel: grpc.aio.Channel, tool_calls: ToolCalls, retry: Retry) -> Fact:
    undone_run_id = run.undo.run_id if run.undo else RunId("")
    try:
        read = await _read(channel, run, undone_run_id, retry)
    except RunNotFound as error:
        failure = RunFailure(failure_class=FailureClass.LIMIT, reason=error.reason, message=error.message)
        return RunRefused(failure=failure)
    planned = undo.plan(read, run)
    to_undo = {step.call_id for step in planned.steps}
    inverses = (undo.inverse_of(source.call) for source in read if source.call.call_id in to_undo)
    names = sorted({inverse.tool_name for inverse in inverses if inverse is not None})
    tools = [tool for name in names if (tool := await _pinned(name, tool_calls)) is not None]
    return ToolsPinned(tools=tuple(tools), cursor=planned)


async def _pinned(name: str, tool_calls: ToolCalls) -> PinnedTool | None:
    try:
        tools = (await tool_calls.resolve([name])).tools
    except ToolNotFound:
        return None
    return next((PinnedTool(name=tool.name, version=tool.version) for tool in tools if tool.name == name), None)
