"""One run from its message to its end."""

from __future__ import annotations

from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
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


async def test_of_messages_that_interrupt_a_run_before_it_has_stopped_the_last_one_wins(user: User) -> None:
    owner = await user.start(conversation_id="c")
    waiting = await user.submit("later", conversation_id="c")
    interrupt = {"policy": pb.MESSAGE_POLICY_INTERRUPT, "conversation_id": "c"}
    first, second, third = [await user.submit(text, **interrupt) for text in ("do A", "no, do B", "no, do C")]
    unread = [command.command_id for command in await owner.inbox()]
    await owner.commit(state=run_pb2.RUN_STATE_CANCELLED, consumed=unread)

    for superseded in (first, second):
        run = await user.run(superseded.run.run_id)
        assert (run.state, run.stop_cause) == (run_pb2.RUN_STATE_CANCELLED, run_pb2.STOP_CAUSE_SUPERSEDED)
    (claimed,) = await user.claim()
    assert claimed.run_id == third.run.run_id
    winner = user.owner(claimed.run_id, claimed.epoch)
    assert [message.text for message in (await winner.load()).messages] == ["hello", "do A", "no, do B", "no, do C"]
    await winner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    (claimed,) = await user.claim()
    assert claimed.run_id == waiting.run.run_id


async def test_who_brings_a_message_hears_its_place_in_the_queue(user: User) -> None:
    """Also who asks again, and whose message goes before the others."""
    await user.start(conversation_id="conv")
    second = await user.submit(conversation_id="conv", request_id="r2")
    third = await user.submit(conversation_id="conv", request_id="r3")
    assert (second.run.queue_position, third.run.queue_position) == (1, 2)

    hurried = await user.submit(conversation_id="conv", policy=pb.MESSAGE_POLICY_INTERRUPT)
    assert hurried.run.queue_position == 1
    again = await user.submit(conversation_id="conv", request_id="r3")
    assert again.run.queue_position == 3
    assert (await user.submit(conversation_id="other")).run.queue_position == 0
