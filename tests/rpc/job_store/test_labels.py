"""Labels, and the filters of lists: what meets all of them is listed, along an index."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pawl.chassis.rpc_client import translating
from pawl.errors import InvalidField
from pawl.event.v1 import conversation_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from tests.rpc.job_store.test_conversations import get, listed, update
from tests.rpc.job_store.test_delegation import delegating
from tests.rpc.job_store.user import User

WAITING, QUEUED = run_pb2.RUN_STATE_WAITING, run_pb2.RUN_STATE_QUEUED
APPROVAL, ANSWER = run_pb2.WAIT_KIND_APPROVAL, run_pb2.WAIT_KIND_ANSWER
CLERK = run_pb2.PinnedAgent(name="clerk", version=3)


async def runs(user: User, **fields: Any) -> list[run_pb2.Run]:
    """All pages of two."""
    request = pb.ListRunsRequest(store_id=user.store_id, user_id=user.user_id, page_size=2, **fields)
    found: list[run_pb2.Run] = []
    while True:
        with translating():
            page = await user.stub.ListRuns(request)
        found += page.runs
        request.page_token = page.next_page_token
        if not request.page_token:
            return found


async def some_runs(user: User) -> None:
    """Runs of two agents, in one conversation and others, with labels and without, most of which wait."""
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
        and wanted.get("agent_name", run.agent.name or "default") == (run.agent.name or "default")
        and wanted.get("labels", {}).items() <= dict(run.labels).items()
    )


async def test_what_meets_all_filters_is_listed_and_nothing_else(user: User) -> None:
    await some_runs(user)
    await some_runs(User(user.stub, user_id="bob"))
    everything = await runs(user)
    assert len(everything) == 12
    choices: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("conversation_id", ("of_ann",)),
        ("states", ([WAITING], [QUEUED, WAITING])),
        ("waits", ([ANSWER], [APPROVAL, ANSWER])),
        ("agent_name", ("clerk", "default")),
        ("labels", ({"env": "prod"}, {"env": "prod", "team": "a=b: c"}, {"env": "test"})),
    )
    for chosen in itertools.product(*((None, *values) for _, values in choices)):
        wanted = {name: value for (name, _), value in zip(choices, chosen, strict=True) if value is not None}
        found = [run.run_id for run in await runs(user, **wanted)]
        assert found == [run.run_id for run in everything if meets(run, wanted)], wanted


async def test_a_run_below_another_one_is_found_by_it_and_by_its_own_agent(user: User) -> None:
    owner = await user.start(labels={"env": "prod"})
    child = await delegating(user, owner, "child", agent=CLERK)
    assert [run.run_id for run in await runs(user, parent_run_id=owner.run_id)] == [child.run_id]
    assert [run.run_id for run in await runs(user, agent_name="clerk")] == [child.run_id]
    assert [run.run_id for run in await runs(user, labels={"env": "prod"})] == [owner.run_id]
    assert not await runs(User(user.stub, user_id="bob"), parent_run_id=owner.run_id)


async def test_labels_are_in_the_run_and_in_its_events(user: User) -> None:
    made = {"env": "prod", "team": "zwei drei"}
    owner = await user.start(labels=made)
    assert dict((await user.run(owner.run_id)).labels) == made
    events = await user.events(owner.run_id)
    told = [dict(event.run_changed.run.labels) for event in events if event.HasField("run_changed")]
    assert told == [made] * len(told)
    assert told


async def test_labels_that_cannot_be_make_no_run(user: User) -> None:
    for refused in ({"pawl.x": ""}, {"Env": "x"}, {"env": "a\nb"}, {f"k{number}": "" for number in range(17)}):
        with pytest.raises(InvalidField):
            await user.submit(labels=refused)
        with pytest.raises(InvalidField):
            await runs(user, labels=refused)
    assert not await runs(user)


async def test_conversations_are_found_by_all_of_their_labels(user: User) -> None:
    bob = User(user.stub, user_id="bob")
    for number, who in enumerate((user, user, user, bob)):
        await who.submit(conversation_id=f"c{number}")
        made = {"env": "prod", **({"team": "a"} if number == 1 else {})}
        if number != 2:
            changed = await update(who, f"c{number}", labels=conversation_pb2.Labels(labels=made))
            assert dict(changed.labels) == made
    assert await listed(user, labels={"env": "prod"}) == ["c1", "c0"]
    assert await listed(user, labels={"env": "prod", "team": "a"}) == ["c1"]
    assert not await listed(user, labels={"env": "prod", "team": "b"})
    await update(user, "c1", archived=True)
    assert await listed(user, labels={"env": "prod"}, archived=False) == ["c0"]
    assert dict((await get(user, conversation_id="c1")).labels) == {"env": "prod", "team": "a"}
    await update(user, "c1", labels=conversation_pb2.Labels())
    assert await listed(user, labels={"env": "prod"}) == ["c0"]
    with pytest.raises(InvalidField):
        await update(user, "c0", labels=conversation_pb2.Labels(labels={"pawl.x": ""}))
    with pytest.raises(InvalidField):
        await listed(user, labels={"": "x"})
