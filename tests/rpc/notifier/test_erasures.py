"""What was told of an erased conversation is told no more, whatever is still on its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pawl.chassis.database import Database
from pawl.chassis.erasures import ErasurePart
from pawl.chassis.ids import ConversationId, RunId, StoreId, UserId
from pawl.notifier.adapters.postgres import ERASE, PostgresStore
from pawl.notifier.domain.notification import Draft, Inbox, NotificationId, NotificationKind

ANN = Inbox(store_id=StoreId("acme"), user_id=UserId("ann"))
OTHER = Inbox(store_id=StoreId("other"), user_id=UserId("ann"))
PART = ErasurePart(
    store_id=StoreId("acme"), conversation_id=ConversationId("conv_1"), run_ids=["run_1"], call_ids=["call_1"]
)


async def titles(store: PostgresStore, inbox: Inbox) -> list[str]:
    return [each.draft.title for each in await store.read_after(inbox, 0, approves=True, limit=10)]


async def test_notifications_of_an_erased_conversation_go_and_none_comes(
    store: PostgresStore, draft: Callable[..., Draft]
) -> None:
    """I13."""
    await store.add([draft("a"), draft("b", store="other")])
    for _ in range(2):
        await store.erase(PART)
    assert await store.add([draft("c"), draft("d", store="other")]) == 1
    assert await titles(store, ANN) == []
    assert await titles(store, OTHER) == ["About b", "About d"]


async def test_what_approvers_were_told_of_its_calls_goes_too(
    store: PostgresStore, draft: Callable[..., Draft]
) -> None:
    """I13: a preview has arguments. The version before did not keep which conversation it is."""
    told = replace(draft("a"), kind=NotificationKind.APPROVAL_NEEDED, conversation_id=ConversationId(""))
    await store.add([told, replace(told, notification_id=NotificationId("ntf_b"), run_id=RunId("run_2"))])
    await store.erase(PART)
    (left,) = await store.read_after(ANN, 0, approves=True, limit=10)
    assert left.draft.run_id == "run_2"


async def test_what_is_erased_is_found_by_an_index(database: Database) -> None:
    await database.execute("""
        INSERT INTO notifier.notifications (store_id, user_id, number, notification_id, kind, run_id, conversation_id,
            event_id, title, body, create_time)
        SELECT 'acme', 'ann', n, 'ntf_' || n, 'run_completed', 'run_' || n, CASE WHEN n % 2 = 0 THEN 'conv_' || n
            ELSE '' END, '', '', '', now()
        FROM generate_series(1, 5000) AS n""")
    await database.execute("ANALYZE notifier.notifications")
    plan = await database.fetch(f"EXPLAIN {ERASE}", "acme", "conv_1", ["run_1"])
    assert sum("Index Cond" in line and "conversation_id" in line for (line,) in plan) == 2
    assert not any("Seq Scan" in line for (line,) in plan)
