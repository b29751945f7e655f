"""The sweep of erasures where very much is to be erased, or what it needs is away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

import pytest

from pawl.chassis.database import Database
from pawl.chassis.ids import ConversationId, StoreId
from pawl.errors import DependencyUnavailable
from tests.rpc.job_store.conftest import Replica
from tests.rpc.job_store.test_erasures import (
    MARKER,
    SERVICES,
    Log,
    erase,
    erasing,
    everything,
    full,
    full_many,
    swept,
)
from tests.rpc.job_store.user import User

_MANY = """
INSERT INTO job_store.conversations (store_id, conversation_id, user_id, queue, interrupting, last_number, create_time,
    update_time, erase_time, erase_user_id, erase_root, erase_parts)
SELECT 'other', 'old_' || n, '', '', '', 0, now(), now(), now() - interval '1 hour', 'bob', 'old_' || n, $1
FROM generate_series(1, 2001) AS n
"""


async def test_a_large_stream_is_not_read_all_the_time(replica: Replica, user: User) -> None:
    """What was erased in the meantime is purged together."""
    now, log = [0.0], Log()

    async def takes_ten_seconds(store_id: StoreId, run_ids: Collection[str]) -> int:
        now[0] += 10
        log.purged |= set(run_ids)
        return len(run_ids)

    log.purge = takes_ten_seconds  # type: ignore[method-assign]
    sweep = erasing(replica, log, lambda: now[0])
    for number in range(3):
        await erase(replica, await full_many(user, number))
        await swept(sweep)
    assert (now[0], len(log.purged)) == (10.0, 1)
    now[0] = 101.0
    await swept(sweep)
    assert (now[0], len(log.purged)) == (111.0, 3)


@pytest.mark.parametrize("parts", [["notifier"], ["log"], ["tool-registry", "future"]])
async def test_very_many_that_wait_for_something_else_hold_up_nothing(
    replica: Replica, user: User, parts: list[str]
) -> None:
    await replica.database.execute(_MANY, parts)
    conversation_id, run_id = await full(user)
    await erase(replica, conversation_id)
    log = Log()
    log.is_away = True
    sweep = erasing(replica, log)
    await swept(sweep)
    assert MARKER not in await everything(replica.database)
    assert log.purged == {run_id}


async def test_a_service_is_told_what_it_may_erase_behind_very_many_that_it_may_not(
    replica: Replica, database: Database
) -> None:
    await database.execute(_MANY, ["runs", "ledger", "tool-registry", "log"])
    conversations = "store_id, conversation_id, user_id, queue, interrupting, last_number, create_time, update_time"
    await database.execute(f"""
        INSERT INTO job_store.conversations ({conversations}, erase_time, erase_user_id, erase_root, erase_parts)
        SELECT 'acme', n, '', '', '', 0, now(), now(), now(), 'ann', n, ARRAY[n, 'log']
        FROM unnest(ARRAY['tool-registry', 'notifier']) AS n""")  # noqa: S608  # constants
    sweep = erasing(replica, None)
    for part in SERVICES:
        assert [str(key.conversation_id) async for key, _ in sweep.due(part)] == [part.value]


async def test_a_list_that_could_not_be_applied_is_applied_again(replica: Replica, user: User) -> None:
    """I22: as after a restore, when the database is away for a moment."""
    conversation_id, _ = await full(user)
    log = Log()
    log.entries.add((StoreId("acme"), ConversationId(conversation_id)))
    log.looks = [False]
    failed, read = [False], log.read

    async def fails_once() -> AsyncIterator[Collection[tuple[StoreId, ConversationId]]]:
        if not failed[0]:
            failed[0] = True
            raise DependencyUnavailable
        async for each in read():
            yield each

    log.read = fails_once  # type: ignore[method-assign]
    await swept(erasing(replica, log))
    assert failed[0]
    assert MARKER not in await everything(replica.database)
