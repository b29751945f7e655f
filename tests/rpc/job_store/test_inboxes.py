"""The inbox of a run has bounds, and what a run waits for gets in all the same."""

from __future__ import annotations

import pytest

from pawl.chassis.database import Database
from pawl.errors import QueueFull
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.domain import inbox
from tests.rpc.job_store.user import DIGEST, User, result

STEER = pb.MESSAGE_POLICY_STEER
LARGE = "x" * 256 * 1024
FITTING = inbox.LIMITS.bytes_max // len(LARGE)


async def waiting(user: User) -> tuple[str, str]:
    """A parked run that waits for a result, and its conversation."""
    owner = await user.start()
    await owner.park(run_pb2.WAIT_KIND_TOOL_RESULT, calls=[owner.call("call", call_pb2.CALL_STATE_OFFERED)])
    return owner.run_id, (await user.run(owner.run_id)).conversation_id


async def fill(user: User, conversation_id: str, text: str, count: int) -> None:
    for _ in range(count):
        assert (await user.submit(text, conversation_id=conversation_id, policy=STEER)).steered


async def test_a_run_takes_only_so_many_bytes_of_messages(user: User) -> None:
    run_id, conversation_id = await waiting(user)
    await fill(user, conversation_id, LARGE, FITTING)

    with pytest.raises(QueueFull):
        await user.submit(LARGE, conversation_id=conversation_id, policy=STEER)

    # Whoever may not enter may wait for a turn, and what the run waits for gets in.
    assert not (await user.submit(LARGE, conversation_id=conversation_id)).steered
    brought = await user.send(run_id, tool_result=pb.ToolResultCommand(call_id="call", result=result(f'"{LARGE}"')))
    assert brought.outcome == pb.COMMAND_OUTCOME_ACCEPTED
    assert (await user.cancel(run_id)).outcome == pb.COMMAND_OUTCOME_ACCEPTED


async def test_messages_count_until_they_stand_in_the_conversation(user: User) -> None:
    """Also those that the owner has read and keeps elsewhere."""
    run_id, conversation_id = await waiting(user)
    await fill(user, conversation_id, LARGE, FITTING)
    (claimed,) = await user.claim()
    owner = user.owner(run_id, claimed.epoch)
    unread = [command.command_id for command in await owner.inbox()]
    await owner.commit(consumed=unread, loop_state=b"all of them")

    with pytest.raises(QueueFull):
        await user.submit(LARGE, conversation_id=conversation_id, policy=STEER)
    await owner.commit(messages=[message_pb2.Message(role=message_pb2.ROLE_USER, text=LARGE)])

    await fill(user, conversation_id, LARGE, 1)
    with pytest.raises(QueueFull):
        await user.submit(LARGE, conversation_id=conversation_id, policy=STEER)


async def receipts_of(database: Database, run_id: str) -> int:
    async with database.acquire() as connection:
        return int(await connection.fetchval("SELECT count(*) FROM job_store.commands WHERE run_id = $1", run_id))


async def test_a_run_keeps_only_so_many_receipts_of_what_it_refused(user: User, database: Database) -> None:
    """Else a user could add rows without end, before and after the end of a run."""
    run_id, _ = await waiting(user)
    decision = pb.DecisionCommand(call_id="call", kind=call_pb2.DECISION_KIND_APPROVE, digest=DIGEST)
    for number in range(inbox.LIMITS.idle_receipts_max + 20):
        receipt = await user.send(run_id, f"refused_{number}", decision=decision)
        assert receipt.outcome == pb.COMMAND_OUTCOME_REFUSED
    assert await receipts_of(database, run_id) == inbox.LIMITS.idle_receipts_max

    # What is taken gets in all the same, and is remembered.
    brought = {"tool_result": pb.ToolResultCommand(call_id="call", result=result())}
    outcomes = [(await user.send(run_id, "brought", **brought)).outcome for _ in range(2)]
    assert outcomes == [pb.COMMAND_OUTCOME_ACCEPTED, pb.COMMAND_OUTCOME_DUPLICATE]
    # The first refusals are final; one whose receipt is not kept is judged by what there is now.
    first = await user.send(run_id, "refused_0", decision=decision)
    last = await user.send(run_id, f"refused_{inbox.LIMITS.idle_receipts_max}", decision=decision)
    assert (first.outcome, last.outcome) == (pb.COMMAND_OUTCOME_REFUSED, pb.COMMAND_OUTCOME_LATE)
    assert await receipts_of(database, run_id) == inbox.LIMITS.idle_receipts_max + 1
