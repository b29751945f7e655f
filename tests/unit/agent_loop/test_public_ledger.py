"""What a user does through this process, and makes a run due by, is looked for at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from pawl.agent_loop.adapters.public_ledger import PublicLedgerClient
from pawl.agent_loop.app.public_values import BroughtTools, MessagePolicy, NewMessage
from pawl.agent_loop.domain.command import Cancel
from pawl.agent_loop.domain.options import AskedOptions
from pawl.agent_loop.domain.run import RunOptions, StopCause
from pawl.chassis.auth import Principal
from pawl.chassis.ids import ClientId, CommandId, ConversationId, RequestId, RunId, StoreId, UserId
from pawl.errors import DependencyUnavailable, MethodNotFound
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from tests.fakes.registry import own_tool

CALLER = Principal(store_id=StoreId("acme"), user_id=UserId("ann"))
MESSAGE = NewMessage(
    request_id=RequestId(""),
    conversation_id=ConversationId("conv"),
    conversation_must_exist=False,
    text="hello",
    options=RunOptions(),
    asked_options=AskedOptions(),
    policy=MessagePolicy.QUEUE,
)


class Channel:
    """Answers every call in the same way."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def unary_unary(self, *_: object, **__: object) -> Callable[[object], Awaitable[Any]]:
        async def answer(_: object) -> Any:
            return self._response

        return answer

    unary_stream = unary_unary


async def looks(response: Any, ask: Callable[[PublicLedgerClient], Awaitable[object]]) -> int:
    """Return how often runs were looked for."""
    found: list[None] = []
    channel: Any = Channel(response)
    await ask(PublicLedgerClient(channel, lambda: found.append(None)))
    return len(found)


async def submit(ledger: PublicLedgerClient) -> object:
    return await ledger.submit_message(CALLER, MESSAGE)


async def cancel(ledger: PublicLedgerClient) -> object:
    return await ledger.send_command(CALLER, RunId("run"), CommandId("cmd"), Cancel(cause=StopCause.USER))


@pytest.mark.parametrize(
    ("state", "count"), [("QUEUED", 1), ("WAITING", 1), ("CANCELLING", 1), ("RUNNING", 0), ("COMPLETED", 0)]
)
async def test_a_run_that_may_be_due_is_looked_for(state: str, count: int) -> None:
    run = run_pb2.Run(state=run_pb2.RunState.Value(f"RUN_STATE_{state}"))
    assert await looks(pb.SubmitMessageResponse(run=run), submit) == count
    taken = pb.SendCommandResponse(outcome=pb.COMMAND_OUTCOME_ACCEPTED, run=run)
    assert await looks(taken, cancel) == count
    late = pb.SendCommandResponse(outcome=pb.COMMAND_OUTCOME_LATE, run=run)
    assert await looks(late, cancel) == 0


async def test_a_ledger_that_knows_no_tools_of_runs_is_not_there_yet() -> None:
    """I23: nothing is started without them."""

    class Before(Channel):
        def unary_unary(self, *method: object, **__: object) -> Callable[[object], Awaitable[Any]]:
            async def answer(_: object) -> Any:
                assert method == ("/pawl.job.v1.LedgerService/StartRun",)
                raise MethodNotFound

            return answer

    channel: Any = Before(None)
    brought = BroughtTools(tools=(own_tool("show"),), client_id=ClientId("tab"), asked_sha256=b"asked")
    with pytest.raises(DependencyUnavailable, match="try again"):
        await PublicLedgerClient(channel).submit_message(CALLER, replace(MESSAGE, brought=brought))
