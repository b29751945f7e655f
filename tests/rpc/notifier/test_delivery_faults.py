"""Deliveries that wait, fail, or end while something is delivered (NOTE-1)."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from pawl.chassis.database import Database
from pawl.chassis.egress import GuardedEgress
from pawl.chassis.erasures import ErasurePart
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.chassis.tasks import end
from pawl.notifier.adapters.deliveries import CLAIM, DUE, GIVE_BACK, HOLD_DUE, SETTLE, PostgresDeliveries
from pawl.notifier.adapters.postgres import ADD, MARK_READ, NOTE_OVER, PostgresStore, added_columns
from pawl.notifier.adapters.postgres import WAITING as WAITING_SQL
from pawl.notifier.app.ports import NewChannel, NewCode
from pawl.notifier.domain.announcement import (
    ApprovalAsked,
    Change,
    Over,
    RunChange,
    draft_notification,
    draft_requests,
    over_by,
)
from pawl.notifier.domain.channel import CODE_LASTS, Channel, ChannelId, ChannelKind
from pawl.notifier.domain.delivery import (
    TEST,
    TESTS_KEPT,
    Candidate,
    ChannelDelivery,
    DeliveryFilter,
    DeliveryId,
    DeliveryState,
    Outcome,
    choose,
)
from pawl.notifier.domain.notification import Draft, EventId, Inbox, NotificationKind
from pawl.notify.v1 import channel_pb2 as pb
from tests.poll import until
from tests.rpc.notifier.conftest import Repository, waiting_for_locks, wired
from tests.rpc.notifier.desk import ANN_ELSEWHERE, BOB, DELIVERED, SKIPPED, WAITING, Desk
from tests.web_server import Reply, WebServer

Drafts = Callable[..., Draft]
NOW = datetime(2026, 5, 1, tzinfo=UTC)
ANNS, BOBS = (Inbox(store_id=StoreId("acme"), user_id=UserId(user)) for user in ("ann", "bob"))
FAILED, GONE = Outcome(status=500), Outcome(status=410)
HOOK = ChannelId("hook_1")


@pytest.fixture
def repository(database: Database) -> Repository:
    return Repository(database)


async def hook(
    repository: Repository,
    channel_id: str = HOOK,
    *,
    inbox: Inbox = ANNS,
    host: str = "example.com",
    scheme: str = "https",
) -> Channel:
    channel = Channel(
        channel_id=ChannelId(channel_id), name="", url=f"{scheme}://{host}/", after_seconds=0, create_time=NOW
    )
    new = NewChannel(inbox=inbox, channel=channel, host=host, secret=b"s", request_id="", request_hash=b"")
    return await repository.create(new)


async def tried(repository: Repository, outcome: Outcome) -> Candidate:
    """Try the one that is due."""
    (candidate,) = await repository.due([], limit=10)
    (attempt,) = await repository.claim([candidate], seconds=30)
    assert await repository.settle(attempt, outcome, chance=0.5)
    return candidate


def made_test(number: int = 0) -> ChannelDelivery:
    return ChannelDelivery(
        delivery_id=DeliveryId(f"dlv_test{number}"),
        channel_id=HOOK,
        type=TEST,
        number=0,
        state=DeliveryState.WAITING,
        tries=0,
        create_time=NOW,
    )


def made_code() -> NewCode:
    """A code, which is not sent to a webhook."""
    return NewCode(delivery=made_test(), secret=b"s")


async def test_a_channel_that_fails_has_one_try_at_once_and_users_with_few_are_first(
    repository: Repository, store: PostgresStore, draft: Drafts, database: Database
) -> None:
    await hook(repository, "hook_dead", host="dead.test")
    await store.add([draft("first")])
    await tried(repository, FAILED)
    await store.add([draft(f"dead{number}") for number in range(30)])
    (failing,) = choose(await repository.due([], limit=500), [])
    assert await repository.due([failing], limit=500) == [], "it has its one"
    await hook(repository, "hook_ann", host="a.test")
    await hook(repository, "hook_bob", inbox=BOBS, host="b.test")
    await store.add([draft(f"ann{number}") for number in range(30)])
    await store.add([draft("bob", user="bob")])
    found = await repository.due([failing], limit=500)
    assert [each.channel_id for each in found[:2]] == ["hook_bob", "hook_ann"]
    assert len(found) == 17, "of each webhook no more than may be tried"


async def test_tests_neither_fail_a_channel_nor_tell_nor_pile_up(repository: Repository, database: Database) -> None:
    await hook(repository)
    for number in range(TESTS_KEPT + 5):
        await repository.add_test(ANNS, made_test(number), "{}")
        await tried(repository, FAILED)
    assert (await repository.channel(ANNS, HOOK)).failing_since_time is None
    assert len(await repository.deliveries(ANNS, DeliveryFilter(channel_id=HOOK), None, limit=100)) == TESTS_KEPT + 1
    await repository.add_test(ANNS, made_test(99), "{}")
    await tried(repository, GONE)
    assert not (await repository.channel(ANNS, HOOK)).enabled
    assert await database.fetchval("SELECT count(*) FROM notifier.notifications") == 0


async def test_a_look_at_what_is_due_costs_the_same_however_much_waits(
    repository: Repository, database: Database
) -> None:
    await hook(repository)
    await database.execute(
        """
        INSERT INTO notifier.webhook_deliveries (delivery_id, webhook_id, store_id, user_id, type, body)
        SELECT 'dlv_' || n, 'hook_1', 'acme', 'ann', 'webhook.test', '{}' FROM generate_series(1, 20000) AS n
        """
    )
    await database.execute("ANALYZE notifier.webhook_deliveries")
    assert len(await repository.due([], limit=500)) == 16
    assert await pages(database, DUE, [], [], [], [], [], 16, 1, 32, 500) < 200, "it would read 20,000 rows"


async def test_what_is_looked_up_is_found_by_its_own_index_before_there_are_statistics(
    repository: Repository, store: PostgresStore, draft: Drafts, database: Database
) -> None:
    await hook(repository)
    for first in range(0, 2000, 200):
        await store.add([draft(f"run{first + number}") for number in range(200)])
    found = [each.delivery_id for each in await repository.due([], limit=500)]
    assert await pages(database, HOLD_DUE, found, CODE_LASTS) < 500, "all of the user for each"


@pytest.mark.parametrize("needs", [2000, 0], ids=["many rows", "a new database"])
async def test_what_comes_in_and_goes_out_reads_nothing_of_others(
    repository: Repository, store: PostgresStore, draft: Drafts, database: Database, needs: int
) -> None:
    """Before there are statistics, also by the plans that are made for empty tables and kept."""
    await hook(repository)
    for first in range(0, needs, 200):
        drafts = [draft(f"run{first + number}") for number in range(200)]
        kind = NotificationKind.INPUT_NEEDED
        await store.add([replace(each, kind=kind, run_id=RunId(each.event_id)) for each in drafts])
    plans = {
        name: str(await database.fetch(f"EXPLAIN {statement}", *arguments))
        for name, statement, arguments in (
            ("claim", CLAIM, (["dlv_1"], [True], [None], [None], ["waiting"])),
            ("settle", SETTLE, ("dlv_1", NOW, "waiting", 1.0, 500, 1, "")),
            ("give back", GIVE_BACK, (["dlv_1"], [NOW])),
            ("over", NOTE_OVER, (["acme"], ["run1"], [""], [NOW], [False])),
            ("waiting", WAITING_SQL, (["acme"], ["ann"], ["conv"])),
            ("read", MARK_READ, ("acme", "ann", ["ntf_1"])),
        )
    }
    used = {
        name: set(re.findall(r"(?:using|Index Scan on|Seq Scan on) ((?:notifications|webhook)\w+)", plan))
        for name, plan in plans.items()
    }
    assert used == {
        "claim": {"webhook_deliveries_pkey"},
        "settle": {"webhook_deliveries_pkey"},
        "give back": {"webhook_deliveries_pkey"},
        "over": {"notifications_needed", "notifications_pkey"},
        "waiting": {"notifications_of_conversation"},
        "read": {"notifications_by_id"},
    }


async def pages(database: Database, statement: str, *arguments: object) -> int:
    """Return how many pages a statement touches."""
    ((told,),) = await database.fetch(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *arguments)
    plan = json.loads(told)[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@pytest.mark.parametrize("ends", ["delete", "disable", "gone"])
async def test_a_channel_that_ends_while_it_is_told_is_told_nothing(
    repository: Repository, store: PostgresStore, draft: Drafts, database: Database, ends: str
) -> None:
    channel = await hook(repository)
    await store.add([draft("first")])
    (candidate,) = await repository.due([], limit=1)
    (attempt,) = await repository.claim([candidate], seconds=30)

    async def end_it() -> None:
        if ends == "delete":
            await repository.delete(ANNS, HOOK)
        elif ends == "disable":
            await disabled(repository, channel)
        else:
            await repository.settle(attempt, GONE, chance=0.5)

    async with database.transaction() as connection:
        await connection.fetchval(ADD, *added_columns([draft("second")]))
        ending = asyncio.create_task(end_it())
        await asyncio.sleep(0.2)
        assert not ending.done()
    await asyncio.wait_for(ending, 60)
    assert await repository.due([], limit=10) == []
    waiting = (await repository.count_waiting()).values()
    assert sum(count for count, _ in waiting) == (ends == "disable"), "one is at work"
    kept = await database.fetchval("SELECT count(*) FROM notifier.webhook_deliveries")
    assert kept == (0 if ends == "delete" else 2)


@pytest.mark.parametrize("ends", ["gone", "delete", "disable"])
@pytest.mark.parametrize("is_erased", [True, False], ids=["erasure", "retention"])
async def test_what_ends_a_channel_and_what_removes_its_deliveries_do_not_wait_for_each_other(
    repository: Repository, draft: Drafts, database: Database, ends: str, *, is_erased: bool
) -> None:
    channel, store = await hook(repository), PostgresStore(database)
    for event in ("a", "b", "c", "d", "e"):
        await store.add([draft(event)])
    await database.execute("UPDATE notifier.webhook_deliveries SET due_time = '2026-05-01' WHERE number = 3")
    first, *_ = await repository.due([], limit=10)
    attempts = await repository.claim([first], seconds=30) if ends == "gone" else ()
    part = ErasurePart(store_id=ANNS.store_id, conversation_id=ConversationId("conv_1"), run_ids=["run_1"], call_ids=[])

    async def end_it() -> None:
        for attempt in attempts:
            await repository.settle(attempt, GONE, chance=0.5)
        if ends == "delete":
            await repository.delete(ANNS, HOOK)
        if ends == "disable":
            await disabled(repository, channel)

    async with database.transaction() as connection:
        held = "SELECT FROM notifier.webhook_deliveries WHERE delivery_id = $1 FOR UPDATE"
        await connection.execute(held, first.delivery_id)
        ending = asyncio.create_task(end_it())
        await until(lambda: waiting_for_locks(database, 1))
        removal = store.erase(part) if is_erased else store.forget(older_than_seconds=-1.0, limit=10)
        removing = asyncio.ensure_future(removal)
        await until(lambda: waiting_for_locks(database, 2))
    await asyncio.gather(ending, removing)
    assert await database.fetchval("SELECT count(*) FROM notifier.webhook_deliveries") == 0


async def disabled(repository: Repository, channel: Channel) -> Channel:
    return await repository.update(
        ANNS, channel.channel_id, lambda each: (replace(each, enabled=False), "example.com"), code=made_code()
    )


async def test_a_notifier_that_stops_gives_back_what_it_tries(
    repository: Repository, draft: Drafts, database: Database, receiver: WebServer, egress: GuardedEgress
) -> None:
    """As in a deploy: another one goes on at once, and it is no try that has failed."""
    receiver.answer = lambda _: Reply(waits=True)
    await hook(repository, host=f"127.0.0.1:{receiver.port}", scheme="http")
    await PostgresStore(database).add([draft("a")])
    running = asyncio.create_task(wired(database, egress).deliveries.run())
    await until(lambda: len(receiver.asked) == 1)
    assert await repository.due([], limit=1) == []
    await end([running])
    (again,) = await repository.claim(await repository.due([], limit=1), seconds=30)
    assert (again.is_lost, again.tries) == (False, 1)


async def test_what_is_due_and_tried_by_nobody_is_late_unless_its_channel_fails(
    repository: Repository, store: PostgresStore, draft: Drafts, database: Database
) -> None:
    """OPS-2."""
    await hook(repository)
    await store.add([draft("a"), draft("b")])
    late = "UPDATE notifier.webhook_deliveries SET due_time = now() - interval '9 min'"
    await database.execute(late)
    count, delay_seconds = (await repository.count_waiting())[ChannelKind.WEBHOOK]
    assert (count, delay_seconds >= 540) == (2, True)
    await database.execute("UPDATE notifier.webhooks SET failing_since = now()")
    assert (await repository.count_waiting())[ChannelKind.WEBHOOK] == (2, 0.0)


TIME = datetime(2026, 5, 1, tzinfo=UTC)
WAITS = RunChange(
    event_id=EventId("evt_waits"),
    type="run.waiting",
    time=TIME,
    inbox=Inbox(store_id=StoreId("acme"), user_id=UserId("ann")),
    run_id=RunId("run_1"),
    conversation_id=ConversationId("conv_1"),
)
ASKED = ApprovalAsked(
    event_id=EventId("evt_asked"),
    time=TIME,
    store_id=StoreId("acme"),
    user_id=UserId("bob"),
    run_id=RunId("run_1"),
    call_id=CallId("call_1"),
    conversation_id=ConversationId("conv_1"),
    tool_name="pay",
)
SETTLED = Over(
    time=TIME + timedelta(seconds=5), store_id=StoreId("acme"), run_id=RunId("run_1"), call_id=CallId("call_1")
)
RUNS = replace(WAITS, type="run.running", time=SETTLED.time)


@pytest.mark.parametrize(
    ("told", "others", "end"),
    [
        (WAITS, [replace(RUNS, run_id=RunId("run_2")), replace(RUNS, time=TIME), SETTLED], RUNS),
        (ASKED, [replace(SETTLED, call_id=CallId("call_2")), RUNS], SETTLED),
    ],
    ids=["a run that waits", "an approval"],
)
async def test_a_need_is_told_no_more_once_it_is_over_and_not_before(
    desk: Desk, store: PostgresStore, told: RunChange | ApprovalAsked, others: list[Change], end: Change
) -> None:
    channel_id, _ = await desk.hook(after_seconds=600)
    draft = draft_notification(told) if isinstance(told, RunChange) else None
    await store.add([draft] if draft else draft_requests(told, [UserId("ann")]))  # type: ignore[arg-type]
    for change, state in (*((other, WAITING) for other in others), (end, SKIPPED)):
        await store.note_over([over for over in [over_by(change)] if over is not None] * 2)
        await after_no_time(desk)
        found = await desk.looked_at(channel_id)
        assert (found.state, found.last_error) == (state, "nobody is needed any more" if state == SKIPPED else "")


async def after_no_time(desk: Desk) -> None:
    """Have what waits looked at."""
    await desk.database.execute("UPDATE notifier.webhook_deliveries SET due_time = now() WHERE due_time IS NOT NULL")


async def test_what_its_user_watched_is_told_no_more_later_and_stays_in_the_inbox(
    desk: Desk, store: PostgresStore, draft: Drafts
) -> None:
    """NOTE-1: what counts is that the user has seen it, not that a stream was open."""
    later, _ = await desk.hook(after_seconds=600)
    at_once, _ = await desk.hook()
    for metadata in (BOB, ANN_ELSEWHERE):
        hook = pb.Channel(url=f"http://127.0.0.1:{desk.receiver.port}/")
        await desk.stub.CreateChannel(pb.CreateChannelRequest(channel=hook), metadata=metadata)
    told = draft("a")
    await store.add([told])
    await desk.looked_at(later)
    for seconds, store_id, user_id, run_id, state in (
        (-1, "acme", "ann", "run_1", WAITING),
        (1, "acme", "bob", "run_1", WAITING),
        (1, "acme", "ann", "run_2", WAITING),
        (1, "other", "ann", "run_1", WAITING),
        (1, "acme", "ann", "run_1", SKIPPED),
    ):
        await desk.database.execute("DELETE FROM notifier.viewers")
        seen = [(Inbox(store_id=StoreId(store_id), user_id=UserId(user_id)), RunId(run_id))]
        await asyncio.gather(*(PostgresDeliveries(desk.database).note_viewers(seen * 2) for _ in range(3)))
        seen_time = told.create_time + timedelta(seconds=seconds)
        await desk.database.execute("UPDATE notifier.viewers SET seen_time = $1", seen_time)
        await after_no_time(desk)
        found = await desk.looked_at(later)
        assert (found.state, found.last_error) == (state, "the run was watched" if state == SKIPPED else "")
    assert (await desk.delivery(at_once, tries=1)).state == DELIVERED, "what is told at once is told"
    assert [each.HasField("read_time") for each in await desk.inbox()] == [False]
