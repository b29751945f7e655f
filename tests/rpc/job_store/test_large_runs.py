"""A conversation that is larger than any message of gRPC is loaded all the same."""

from __future__ import annotations

from pawl.event.v1 import call_pb2, message_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.rpc.parts import PART_BYTES_MAX
from tests.rpc.job_store.user import User, result

ARGUMENTS_BYTES = 256 * 1024
ROUNDS = 100
ROUNDS_PER_STEP = 10
# What a client of gRPC takes unless it says otherwise.
USUAL_BYTES_MAX = 4 * 1024 * 1024


async def test_a_run_with_200_messages_and_calls_of_256_kib_comes_in_parts(user: User) -> None:
    """Each part fits into a message, and together they are the whole, in order."""
    owner = await user.start("Write it all down")
    arguments = b'{"text":"%s"}' % (b"x" * (ARGUMENTS_BYTES - 11))
    for first in range(0, ROUNDS, ROUNDS_PER_STEP):
        numbers = range(first, first + ROUNDS_PER_STEP)
        messages = [
            message
            for number in numbers
            for message in (
                message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, call_ids=[f"call_{number}"]),
                message_pb2.Message(role=message_pb2.ROLE_USER, text=f"go on {number}"),
            )
        ]
        calls = [
            owner.call(
                f"call_{number}",
                call_pb2.CALL_STATE_FAILED,
                round=number + 1,
                arguments_json=arguments,
                result=result('"no"', is_error=True),
            )
            for number in numbers
        ]
        await owner.commit(messages=messages, calls=calls)

    request = pb.LoadRunRequest(store_id=user.store_id, run_id=owner.run_id, epoch=owner.epoch)
    whole, sizes = pb.LoadRunResponse(), []
    async for part in user.stub.LoadRun(request):
        sizes.append(part.ByteSize())
        whole.MergeFrom(part)

    assert sum(sizes) > ROUNDS * ARGUMENTS_BYTES > USUAL_BYTES_MAX
    assert max(sizes) <= PART_BYTES_MAX + ARGUMENTS_BYTES < USUAL_BYTES_MAX
    assert len(whole.messages) == 2 * ROUNDS + 1
    assert [message.number for message in whole.messages] == list(range(1, 2 * ROUNDS + 2))
    assert [call.call_id for call in whole.calls] == [f"call_{number}" for number in range(ROUNDS)]
    assert {call.arguments_json for call in whole.calls} == {arguments}
    assert whole.run.run_id == owner.run_id
