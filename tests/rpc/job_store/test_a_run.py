"""One run from its message to its end."""

from __future__ import annotations

from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2

from tests.rpc.job_store.user import User, result


async def test_a_run_goes_from_its_message_to_its_answer(user: User) -> None:
    """LOOP-1, EVT-1, EVT-4: every step is in the log, in order, with one end."""
    owner = await user.start("What is 2 + 2?")
    loaded = await owner.load()
    assert [message.text for message in loaded.messages] == ["What is 2 + 2?"]
    await owner.commit(
        events=[event_pb2.RunEvent(round_started=event_pb2.RoundStarted(round=1, model_attempt=1))],
        round=1,
        loop_state=b"thinking",
    )
    await owner.commit(
        events=[event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(round=1, text="Let me see"))],
        messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, call_ids=["call_1"])],
        calls=[owner.call("call_1", call_pb2.CALL_STATE_RUNNING, attempt=1)],
    )
    await owner.commit(calls=[owner.call("call_1", call_pb2.CALL_STATE_SUCCEEDED, attempt=1, result=result("4"))])
    loaded = await owner.load()
    assert loaded.loop_state == b"thinking"
    assert [(call.call_id, call.result.content_json) for call in loaded.calls] == [("call_1", b"4")]
    await owner.commit(
        messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="4")],
        state=run_pb2.RUN_STATE_COMPLETED,
        output_text="4",
        usage=run_pb2.Usage(output_tokens=7),
    )
    run = await user.run(owner.run_id)
    assert (run.state, run.output_text, run.usage.output_tokens) == (run_pb2.RUN_STATE_COMPLETED, "4", 7)
    events = await user.events(owner.run_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.type for event in events] == [
        "run.queued",
        "message.added",
        "run.running",
        "round.started",
        "output.delta",
        "message.added",
        "tool.executing",
        "tool.completed",
        "message.added",
        "run.completed",
    ]
    assert run.last_seq == events[-1].seq == events[-1].run_changed.run.last_seq
