"""Content that events omit because of its size."""

from __future__ import annotations

from datetime import UTC, datetime

from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.event.v1 import call_pb2
from pawl.job_store.ledger.rpc import messages
from pawl.job_store.ledger.rules.rows import CallRow
from pawl.values import CallState

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def settled(content: bytes, inverse_arguments: bytes) -> CallRow:
    inverse = call_pb2.Inverse(tool_name="back", arguments_json=inverse_arguments)
    result = call_pb2.CallResult(content_json=content, inverse=inverse)
    return CallRow(
        store_id=StoreId("store"),
        call_id=CallId("call_1"),
        run_id=RunId("run_1"),
        conversation_id=ConversationId("conv_1"),
        user_id=UserId("me"),
        round=1,
        index=0,
        state=CallState.SUCCEEDED,
        tool_name="write",
        tool_version=1,
        fallback_tool_name="",
        arguments=b"{}",
        attempt=1,
        digest="",
        decision=None,
        deadline_time=None,
        offer=None,
        reserved_by="",
        result=result.SerializeToString(),
        spec=b"",
        create_time=NOW,
        state_time=NOW,
        start_time=NOW,
        end_time=NOW,
    )


def test_a_result_and_its_inverse_are_omitted_if_together_too_large() -> None:
    for content, inverse in ((b"1" * 200, b"{}"), (b"1", b"2" * 200), (b"1" * 60, b"2" * 60)):
        row = settled(content, inverse)
        cut, whole = messages.call(row, result_bytes_max=100), messages.call(row)
        assert not cut.HasField("result")
        assert cut.result_omitted_bytes == len(content) + len(inverse)
        assert whole.result.inverse.arguments_json == inverse
