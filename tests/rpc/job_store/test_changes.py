"""Reads of what has changed in a conversation, on which its watchers rely."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.errors import ConversationErased, ConversationNotFound
from pawl.event.v1 import call_pb2, conversation_pb2, event_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from tests.rpc.job_store.conftest import Replica
from tests.rpc.job_store.test_background import claimed_jobs, ended, start_jobs
from tests.rpc.job_store.user import User


async def changes(user: User, conversation_id: str, after: Any = None, **fields: Any) -> pb.ListChangesResponse:
    since = after.time if after is not None else None
    found: pb.ListChangesResponse = await user.ask(
        "ListChanges", conversation_id=conversation_id, messages_max=100, since_time=since, **fields
    )
    return found


async def share(user: User, conversation_id: str, sharing: conversation_pb2.Sharing.ValueType) -> None:
    await user.ask("UpdateConversation", conversation_id=conversation_id, sharing=sharing)


async def test_only_runs_that_changed_since_a_time_are_listed(user: User) -> None:
    conversation_id = await start_jobs(user, "one", "two")
    first = await changes(user, conversation_id)
    assert list(first.run_ids) == ["job_one", "job_two"], "without a time, only open runs"
    assert len(first.messages) == first.conversation.last_message_number
    of_jobs = {(await user.run(job_id)).conversation_id for job_id in first.run_ids}
    assert set(first.conversation_ids) == {conversation_id, *of_jobs}
    (job,) = await claimed_jobs(user)
    await ended(job)
    second = await changes(user, conversation_id, first, after_number=first.messages[-1].number)
    assert job.run_id in second.run_ids
    assert not second.messages
    third = await changes(user, conversation_id, second, all_open=True)
    assert job.run_id not in third.run_ids
    assert len(third.run_ids) >= 1


async def test_a_run_is_listed_again_as_long_as_its_child_may_wait_for_the_user(user: User) -> None:
    owner = await user.start()
    conversation_id = (await user.run(owner.run_id)).conversation_id
    call = owner.call("call_1", call_pb2.CALL_STATE_DELEGATED, child_run_id="run_child", index=0)
    await owner.commit(
        round=1, calls=[call], delegations=[pb.Delegation(call_id="call_1", run_id="run_child", text="work")]
    )
    first = await changes(user, conversation_id)
    assert list(first.run_ids) == [owner.run_id, "run_child"]
    assert first.active_run_id == owner.run_id
    second = await changes(user, conversation_id, first)
    assert list(second.run_ids) == [owner.run_id]
    assert (await user.run("run_child")).conversation_id in second.conversation_ids


async def test_the_version_of_a_run_differs_after_changes_to_it_or_to_its_child(user: User) -> None:
    owner = await user.start()
    conversation_id = (await user.run(owner.run_id)).conversation_id
    call = owner.call("call_1", call_pb2.CALL_STATE_DELEGATED, child_run_id="run_child", index=0)
    await owner.commit(
        round=1, calls=[call], delegations=[pb.Delegation(call_id="call_1", run_id="run_child", text="work")]
    )

    async def versions() -> dict[str, str]:
        found = await changes(user, conversation_id)
        return dict(zip(found.run_ids, found.versions, strict=True))

    assert await versions() == {owner.run_id: "", "run_child": ""}, "the child is QUEUED"
    child = user.owner("run_child", (await user.claim())[0].epoch)
    first = await versions()
    assert all(first.values())
    assert await versions() == first
    await child.commit(events=[event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text="x"))])
    second = await versions()
    assert not set(second.values()) & set(first.values())
    await owner.commit(events=[event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text="x"))])
    third = await versions()
    assert (third["run_child"], third[owner.run_id] != second[owner.run_id]) == (second["run_child"], True)


async def test_other_users_cannot_read_runs_or_unshared_or_erased_conversations(replica: Replica) -> None:
    ann, bob = User(replica.stub), User(replica.stub, user_id="bob")
    conversation_id = await start_jobs(ann, "mine")
    with pytest.raises(ConversationNotFound):
        await changes(bob, conversation_id)
    await share(ann, conversation_id, conversation_pb2.SHARING_WRITE)
    owner = await ann.start(conversation_id=conversation_id)
    seen = await changes(bob, conversation_id)
    assert (list(seen.run_ids), list(seen.conversation_ids), seen.active_run_id) == ([], [conversation_id], "")
    assert b"job_mine" not in seen.SerializeToString()
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    await share(ann, conversation_id, conversation_pb2.SHARING_PRIVATE)
    with pytest.raises(ConversationNotFound):
        await changes(bob, conversation_id)
    await ann.ask("EraseConversation", conversation_id=conversation_id)
    with pytest.raises(ConversationErased):
        await changes(ann, conversation_id)
    with pytest.raises(ConversationNotFound):
        await changes(bob, conversation_id)


async def test_a_version_differs_after_each_change_but_not_after_output(user: User) -> None:
    conversation_id = await start_jobs(user, "one")
    seen: list[str] = []

    async def version() -> str:
        found = await user.ask("ListVersions", store_ids=["acme", "acme"], conversation_ids=[conversation_id, "none"])
        assert found.versions[1] == ""
        return str(found.versions[0])

    async def check_changed() -> None:
        now = await version()
        assert now not in seen
        seen.append(now)

    await check_changed()
    (job,) = await claimed_jobs(user)
    await check_changed()
    owner = await user.start(conversation_id=conversation_id)
    await check_changed()
    await owner.commit(events=[event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text="x"))])
    assert await version() == seen[-1]
    await owner.park(run_pb2.WAIT_KIND_APPROVAL)
    await check_changed()
    await share(user, conversation_id, conversation_pb2.SHARING_READ)
    await check_changed()
    await ended(job)
    await check_changed()
    await user.ask("EraseConversation", conversation_id=conversation_id)
    await check_changed()
