"""Reads from the ledger: pages, logs, tenant isolation, and what has changed in a conversation."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import nullcontext
from typing import Any

import pytest

from pawl.agent.v1 import agent_pb2
from pawl.errors import CallNotFound, ConversationErased, ConversationNotFound, InvalidField, PawlError, SeqBeyondEnd
from pawl.event.v1 import call_pb2, conversation_pb2, event_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.server.db.database import Database
from tests.rpc.job_store.conftest import Replica
from tests.rpc.job_store.test_background import claimed_jobs, ended, start_jobs
from tests.rpc.job_store.test_conversations import get, listed, update
from tests.rpc.job_store.test_delegation import delegating
from tests.rpc.job_store.user import DIGEST, Owner, User, result
from tests.rpc.refusals import raises


async def with_calls(user: User, count: int, **fields: Any) -> Owner:
    owner = await user.start()
    calls = [
        owner.call(f"call_{number}", call_pb2.CALL_STATE_FAILED, index=number, result=result(), **fields)
        for number in range(count)
    ]
    await owner.commit(calls=calls)
    return owner


async def test_runs_are_listed_in_either_order_and_by_time_range(user: User) -> None:
    """All filters allow pages in both orders. The start time is inclusive, the end time exclusive."""
    runs = [(await user.submit(conversation_id="c")).run for _ in range(5)]
    names = [run.run_id for run in runs]
    between: dict[str, Any] = {"create_time_from": runs[1].create_time, "create_time_before": runs[4].create_time}
    narrowed: list[dict[str, Any]] = [{}, {"conversation_id": "c"}, {"states": [run_pb2.RUN_STATE_QUEUED]}]
    for fields, oldest_first in itertools.product(narrowed, (False, True)):
        for wanted, times in ((names, {}), (names[1:4], between)):
            order = agent_pb2.RUN_ORDER_OLDEST_FIRST if oldest_first else agent_pb2.RUN_ORDER_NEWEST_FIRST
            pages = await user.pages("ListRuns", "runs", order=order, page_size=2, **fields, **times)
            expected = wanted if oldest_first else wanted[::-1]
            assert [run.run_id for page in pages for run in page] == expected, (fields, oldest_first)
            assert len(pages) == (len(wanted) + 1) // 2


async def test_calls_and_messages_are_listed_in_order_and_in_pages(user: User) -> None:
    owner = await with_calls(user, 5, arguments_json=b"x" * 700_000)
    await owner.commit(messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=str(n)) for n in range(4)])
    (conversation_id,) = {run.conversation_id for run in (await user.ask("ListRuns")).runs}
    calls = await user.pages("ListCalls", "calls", run_id=owner.run_id)
    assert [[call.index for call in page] for page in calls] == [[0, 1, 2], [3, 4]], "a page is cut at 2 MiB"
    messages = await user.pages("ListMessages", "messages", conversation_id=conversation_id, page_size=2)
    assert [[message.number for message in page] for page in messages] == [[1, 2], [3, 4], [5]]


async def test_pending_calls_are_listed_oldest_first_in_pages(user: User) -> None:
    for number in range(3):
        owner = await user.start(conversation_id=f"c{number}")
        await owner.commit(calls=[owner.call(f"call_{number}", call_pb2.CALL_STATE_ASKED)])
    found = await user.pages("ListPendingCalls", "calls", page_size=2)
    assert [[call.call_id for call in page] for page in found] == [["call_0", "call_1"], ["call_2"]]


async def test_pending_calls_are_listed_for_the_users_whom_they_ask(user: User) -> None:
    asked: dict[str, str | None] = {"usual": None, "of_approvers": "", "of_ann": "ann", "of_kim": "kim"}
    owner = await user.start()
    for index, (call_id, who) in enumerate(asked.items()):
        approval = call_pb2.ApprovalRequest(digest=DIGEST)
        waits = owner.call(call_id, call_pb2.CALL_STATE_AWAITING_APPROVAL, index=index, approval=approval)
        if who is not None:
            waits.asked_user_id = who
        await owner.commit(calls=[waits])
    question = owner.call("question", call_pb2.CALL_STATE_ASKED, index=9, asked_user_id="kim")
    question.question.question = "Well?"
    await owner.commit(calls=[question])
    kim, bob = (User(user.stub, user_id=name) for name in ("kim", "bob"))

    async def listed(who: User, **fields: Any) -> list[str]:
        return [call.call_id for call in (await who.ask("ListPendingCalls", **fields)).calls]

    assert await listed(user) == ["usual", "of_ann"]
    assert await listed(user, approves=True) == ["usual", "of_approvers", "of_ann"]
    assert await listed(kim) == ["of_kim", "question"]
    assert await listed(bob) == await listed(bob, approves=True) == []
    assert await listed(bob, of_all_users=True) == ["usual", "of_approvers"]
    shown = (await kim.ask("ListPendingCalls")).calls[1]
    assert (shown.question.question, shown.conversation_id, shown.user_id) == ("Well?", "", "ann")
    for call_id, is_found_by_bob in {"usual": True, "of_approvers": True, "of_kim": False, "question": False}.items():
        for reader, is_found in ((user, True), (kim, True), (bob, is_found_by_bob)):
            with nullcontext() if is_found else pytest.raises(CallNotFound):
                await reader.ask("GetCall", call_id=call_id, for_approval=True)
    answer: Any = {"kind": call_pb2.DECISION_KIND_ANSWER, "answer": "yes"}
    assert (await bob.decide(owner.run_id, "question", **answer)).reason == "RUN_NOT_FOUND"
    assert (await user.decide(owner.run_id, "question", **answer)).reason == "PERMISSION_DENIED"
    for outcome in (pb.COMMAND_OUTCOME_ACCEPTED, pb.COMMAND_OUTCOME_DUPLICATE):
        taken = await kim.decide(owner.run_id, "question", command_id="kims", **answer)
        assert (taken.outcome, taken.run.conversation_id) == (outcome, "")
    assert (await listed(kim), (await kim.cancel(owner.run_id)).reason) == (["of_kim"], "RUN_NOT_FOUND")


async def test_run_is_read_with_all_its_open_calls(user: User, owner: Owner) -> None:
    states = (call_pb2.CALL_STATE_RUNNING, call_pb2.CALL_STATE_ASKED, call_pb2.CALL_STATE_RUNNABLE)
    calls = [owner.call(f"call_{number}", state, index=number) for number, state in enumerate(states)]
    await owner.commit(calls=[*calls, owner.call("call_3", call_pb2.CALL_STATE_FAILED, index=3, result=result())])
    run = await user.run(owner.run_id)
    assert [call.call_id for call in run.pending_calls] == ["call_1"]
    assert [(call.call_id, call.state) for call in run.active_calls] == [("call_0", states[0]), ("call_2", states[2])]


async def short_of_tokens(user: User, **fields: Any) -> str:
    owner = await user.start(options=run_pb2.RunOptions(limits=run_pb2.RunLimits(total_tokens_max=100)), **fields)
    await owner.park(run_pb2.WAIT_KIND_BUDGET, usage=run_pb2.Usage(input_tokens=90, output_tokens=9))
    return owner.run_id


async def test_runs_waiting_for_tokens_are_listed_after_the_calls(user: User) -> None:
    """Such a run has no waiting call, so only this list shows it to its user."""
    runs = [await short_of_tokens(user, conversation_id=f"short_{number}") for number in range(3)]
    for number in range(2):
        owner = await user.start(conversation_id=f"c{number}")
        await owner.commit(calls=[owner.call(f"call_{number}", call_pb2.CALL_STATE_ASKED)])
    whole = await user.ask("ListPendingCalls")
    assert [call.call_id for call in whole.calls] == ["call_0", "call_1"]
    assert [run.run_id for run in whole.runs] == runs
    assert (whole.runs[0].token_budget, whole.runs[0].usage.input_tokens) == (100, 90)
    for size, expected in ((2, [[], runs[:2], runs[2:]]), (3, [runs[:1], runs[1:]])):
        found = await user.pages("ListPendingCalls", "runs", page_size=size)
        assert [[run.run_id for run in page] for page in found] == expected
    assert [run.run_id for run in (await user.ask("ListPendingCalls", conversation_id="short_1")).runs] == runs[1:2]
    assert not (await user.ask("ListPendingCalls", tool_name="tool")).runs
    await user.cancel(runs[0])
    assert [run.run_id for run in (await user.ask("ListPendingCalls")).runs] == runs[1:]


async def test_approvers_see_other_users_runs_only_while_they_wait_for_tokens(user: User) -> None:
    run_id = await short_of_tokens(user, conversation_id="private")
    bob = User(user.stub, user_id="bob")
    assert not (await bob.ask("ListPendingCalls")).runs
    (run,) = (await bob.ask("ListPendingCalls", of_all_users=True)).runs
    assert run == run_pb2.Run(
        store_id="acme",
        user_id="ann",
        run_id=run_id,
        state=run_pb2.RUN_STATE_WAITING,
        waits=[run_pb2.WAIT_KIND_BUDGET],
        usage=run_pb2.Usage(input_tokens=90, output_tokens=9),
        token_budget=100,
    )
    assert not (await bob.ask("ListPendingCalls", of_all_users=True, store_id="other")).runs


def seqs(page: pb.ListEventsResponse) -> list[int]:
    return [event_pb2.RunEvent.FromString(event).seq for event in page.events]


async def test_log_page_is_limited_by_count_and_by_bytes(user: User, owner: Owner) -> None:
    await owner.commit(events=[event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text="x" * 400_000))] * 5)
    request = pb.ListEventsRequest(store_id="acme", user_id="ann", run_id=owner.run_id, after_seq=3)
    part = await user.stub.ListEvents(request)
    assert (seqs(part), part.last_seq, part.ended) == ([4, 5, 6], 8, False)
    request.events_max = 1
    assert seqs(await user.stub.ListEvents(request)) == [4]
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    assert (await user.stub.ListEvents(request)).ended
    for after_seq in (10, 2**64 - 1):
        assert (await raises(SeqBeyondEnd, user.events(owner.run_id, after_seq=after_seq))).metadata["last_seq"] == "9"


async def test_calls_are_read_together_without_large_fields(user: User, owner: Owner) -> None:
    for number, size in enumerate((10, 5000)):
        answer = result('"' + "x" * size + '"')
        done = owner.call(f"call_{number}", call_pb2.CALL_STATE_FAILED, index=number, result=answer)
        await owner.commit(calls=[done])
    asked: Any = {"call_ids": ["call_1", "call_0", "absent"], "result_bytes_max": 4096}
    found = (await user.ask("GetCalls", **asked)).calls
    assert [(call.call_id, call.HasField("result"), call.result_omitted_bytes > 5000) for call in found] == [
        ("call_0", True, False),
        ("call_1", False, True),
    ]
    assert not any(call.arguments_json or call.proposed_arguments for call in found)
    for stranger in (User(user.stub, user_id="eve"), User(user.stub, store_id="globex")):
        assert not (await stranger.ask("GetCalls", **asked)).calls
    await raises(PawlError, *(user.ask("GetCalls", call_ids=wrong) for wrong in (["a"] * 401, ["no id"])))


async def test_resources_of_other_users_look_exactly_like_missing_ones(user: User) -> None:
    """I13: the errors have equal reasons, messages and metadata."""
    await user.talk("hello", conversation_id="c1")
    owner = await with_calls(user, 1)
    strangers = (User(user.stub, user_id="eve"), User(user.stub, store_id="globex"))
    for method, field, name, wanted in (
        ("GetRun", "run_id", owner.run_id, "RUN_NOT_FOUND"),
        ("ListCalls", "run_id", owner.run_id, "RUN_NOT_FOUND"),
        ("ListEvents", "run_id", owner.run_id, "RUN_NOT_FOUND"),
        ("GetCall", "call_id", "call_0", "CALL_NOT_FOUND"),
        ("ListMessages", "conversation_id", "c1", "CONVERSATION_NOT_FOUND"),
    ):
        refusals = set()
        for who, named in ((user, "absent"), *((stranger, name) for stranger in strangers)):
            error = await raises(PawlError, who.ask(method, **{field: named}))
            refusals.add((error.reason, error.message, *error.metadata.items()))
        assert [reason for reason, *_ in refusals] == [wanted], method


async def test_command_to_another_users_run_does_not_touch_it(user: User, database: Database, owner: Owner) -> None:
    """The command neither waits for the run nor delays it, so its timing does not reveal whether the run exists."""
    bob = User(user.stub, user_id="bob")
    async with database.transaction() as connection, asyncio.timeout(60):
        await connection.execute("SELECT FROM job_store.runs FOR UPDATE")
        for run_id in (owner.run_id, "run_none"):
            assert (await bob.cancel(run_id)).reason == "RUN_NOT_FOUND"
    assert (await user.cancel(owner.run_id)).outcome == pb.COMMAND_OUTCOME_ACCEPTED


async def test_run_with_very_large_results_can_still_be_loaded(user: User, owner: Owner) -> None:
    """I19, I20: the newest results are complete. Of other results, only the size is loaded."""
    large = result('"' + "x" * 1_000_000 + '"')
    for number in range(18):
        call = owner.call(f"call_{number:02}", call_pb2.CALL_STATE_FAILED, index=number, result=large)
        await owner.commit(calls=[call])
    calls = (await owner.load()).calls
    assert [call.call_id for call in calls] == [f"call_{number:02}" for number in range(18)]
    assert [call.HasField("result") for call in calls] == [False] * 2 + [True] * 16
    assert all(call.result_omitted_bytes > 1_000_000 for call in calls[:2])
    assert not any(call.result_omitted_bytes for call in calls[2:])


WAITING, QUEUED = run_pb2.RUN_STATE_WAITING, run_pb2.RUN_STATE_QUEUED
APPROVAL, ANSWER = run_pb2.WAIT_KIND_APPROVAL, run_pb2.WAIT_KIND_ANSWER
CLERK = run_pb2.PinnedAgent(name="clerk", version=3)


async def runs(user: User, **fields: Any) -> list[run_pb2.Run]:
    return [run for page in await user.pages("ListRuns", "runs", page_size=2, **fields) for run in page]


async def some_runs(user: User) -> None:
    for agent, made in itertools.product((None, CLERK), ({}, {"env": "prod"}, {"env": "prod", "team": "a=b: c"})):
        for conversation_id, waits in ((f"of_{user.user_id}", [APPROVAL]), ("", [ANSWER, APPROVAL])):
            asked: dict[str, Any] = {"agent": agent, "asked_agent": agent.name} if agent else {}
            await user.submit(conversation_id=conversation_id, labels=made, **asked)
            (claimed,) = await user.claim() or (None,)
            if claimed is not None:
                await user.owner(claimed.run_id, claimed.epoch).park(*waits)


def meets(run: run_pb2.Run, wanted: dict[str, Any]) -> bool:
    return (
        wanted.get("conversation_id", run.conversation_id) == run.conversation_id
        and (not wanted.get("states") or run.state in wanted["states"])
        and (not wanted.get("waits") or not set(wanted["waits"]).isdisjoint(run.waits))
        and wanted.get("agent", run.agent.name or "default") == (run.agent.name or "default")
        and wanted.get("labels", {}).items() <= dict(run.labels).items()
    )


async def test_runs_are_filtered_by_all_conditions(user: User) -> None:
    await some_runs(user)
    await some_runs(User(user.stub, user_id="bob"))
    everything = await runs(user)
    assert len(everything) == 12
    choices: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("conversation_id", ("of_ann",)),
        ("states", ([WAITING], [QUEUED, WAITING])),
        ("waits", ([ANSWER], [APPROVAL, ANSWER])),
        ("agent", ("clerk", "default")),
        ("labels", ({"env": "prod"}, {"env": "prod", "team": "a=b: c"}, {"env": "test"})),
    )
    for chosen in itertools.product(*((None, *values) for _, values in choices)):
        wanted = {name: value for (name, _), value in zip(choices, chosen, strict=True) if value is not None}
        found = [run.run_id for run in await runs(user, **wanted)]
        assert found == [run.run_id for run in everything if meets(run, wanted)], wanted


async def test_a_child_run_is_found_by_its_parent_and_by_its_own_agent(user: User) -> None:
    owner = await user.start(labels={"env": "prod"})
    child = await delegating(user, owner, "child", agent=CLERK)
    assert [run.run_id for run in await runs(user, parent_run_id=owner.run_id)] == [child.run_id]
    assert [run.run_id for run in await runs(user, agent="clerk")] == [child.run_id]
    assert [run.run_id for run in await runs(user, labels={"env": "prod"})] == [owner.run_id]
    assert not await runs(User(user.stub, user_id="bob"), parent_run_id=owner.run_id)


async def test_conversations_are_found_by_all_of_their_labels(user: User) -> None:
    for number, who in enumerate((user, user, user, User(user.stub, user_id="bob"))):
        await who.submit(conversation_id=f"c{number}")
        made = {"env": "prod", **({"team": "a"} if number == 1 else {})}
        if number != 2:
            assert dict((await update(who, f"c{number}", labels=conversation_pb2.Labels(labels=made))).labels) == made
    assert await listed(user, labels={"env": "prod"}) == ["c1", "c0"]
    assert await listed(user, labels={"env": "prod", "team": "a"}) == ["c1"]
    assert not await listed(user, labels={"env": "prod", "team": "b"})
    await update(user, "c1", archived=True)
    assert await listed(user, labels={"env": "prod"}, archived=False) == ["c0"]
    assert dict((await get(user, conversation_id="c1")).labels) == {"env": "prod", "team": "a"}
    await update(user, "c1", labels=conversation_pb2.Labels())
    assert await listed(user, labels={"env": "prod"}) == ["c0"]
    await raises(
        InvalidField,
        update(user, "c0", labels=conversation_pb2.Labels(labels={"pawl.x": ""})),
        listed(user, labels={"": "x"}),
    )


async def test_run_that_needs_attention_lists_its_running_calls(user: User, owner: Owner) -> None:
    states = {"ran": call_pb2.CALL_STATE_FAILED, "runs": call_pb2.CALL_STATE_RUNNING}
    calls = [owner.call(name, state, index=index) for index, (name, state) in enumerate(states.items())]
    calls[0].result.CopyFrom(result())
    await owner.commit(calls=calls)
    await owner.commit(state=run_pb2.RUN_STATE_NEEDS_ATTENTION, lease_action=pb.LEASE_ACTION_PARK)
    (run,) = (await user.ask("ListAttention")).runs
    assert (run.run_id, [call.call_id for call in run.calls]) == (owner.run_id, ["runs"])
    assert (await User(user.stub, store_id="beta").ask("ListAttention")).runs == []


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
    call = owner.call("call_1", call_pb2.CALL_STATE_DELEGATED, child_run_id="run_child", index=0)
    await owner.commit(
        round=1, calls=[call], delegations=[pb.Delegation(call_id="call_1", run_id="run_child", text="work")]
    )
    first = await changes(user, owner.conversation_id)
    assert (list(first.run_ids), first.active_run_id) == ([owner.run_id, "run_child"], owner.run_id)
    second = await changes(user, owner.conversation_id, first)
    assert list(second.run_ids) == [owner.run_id]
    assert (await user.run("run_child")).conversation_id in second.conversation_ids


async def test_the_version_of_a_run_differs_after_changes_to_it_or_to_its_child(user: User) -> None:
    owner = await user.start()
    call = owner.call("call_1", call_pb2.CALL_STATE_DELEGATED, child_run_id="run_child", index=0)
    await owner.commit(
        round=1, calls=[call], delegations=[pb.Delegation(call_id="call_1", run_id="run_child", text="work")]
    )

    async def versions() -> dict[str, str]:
        found = await changes(user, owner.conversation_id)
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
    await raises(ConversationNotFound, changes(bob, conversation_id))
    await share(ann, conversation_id, conversation_pb2.SHARING_WRITE)
    owner = await ann.start(conversation_id=conversation_id)
    seen = await changes(bob, conversation_id)
    assert (list(seen.run_ids), list(seen.conversation_ids), seen.active_run_id) == ([], [conversation_id], "")
    assert b"job_mine" not in seen.SerializeToString()
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    await share(ann, conversation_id, conversation_pb2.SHARING_PRIVATE)
    await raises(ConversationNotFound, changes(bob, conversation_id))
    await ann.ask("EraseConversation", conversation_id=conversation_id)
    await raises(ConversationErased, changes(ann, conversation_id))
    await raises(ConversationNotFound, changes(bob, conversation_id))


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
