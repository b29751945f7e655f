"""A conversation that stays in use does not grow for ever: what a summary has long stood for goes."""

from __future__ import annotations

import pytest

from pawl.chassis.database import Database
from pawl.errors import CallNotFound, RunNotFound
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.adapters.retention import PostgresRetention
from tests.rpc.job_store.conftest import DAY_SECONDS
from tests.rpc.job_store.test_upkeep import sweep
from tests.rpc.job_store.user import Owner, User, result


async def talk(user: User, call_id: str, *, summarised_to: int = 0) -> Owner:
    """Let a run of the conversation begin with a summary, if it has one to write, do a call, and end."""
    owner = await user.start("a question", conversation_id="thread")
    await user.send(owner.run_id, f"cmd_{call_id}", steer=pb.SteerCommand(text="hi"))
    summary = message_pb2.Message(role=message_pb2.ROLE_SUMMARY, text="So far.", summarised_to_number=summarised_to)
    answer = message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="An answer.", call_ids=[call_id])
    call = owner.call(call_id, call_pb2.CALL_STATE_FAILED, result=result())
    messages = [summary, answer] if summarised_to else [answer]
    await owner.commit(messages=messages, calls=[call], consumed=[f"cmd_{call_id}"])
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    return owner


async def age(database: Database, *, days: int = 31) -> None:
    """Let all but the conversations be so much older."""
    async with database.acquire() as connection:
        for table, columns in {"messages": ["create_time"], "runs": ["create_time", "end_time"]}.items():
            changes = ", ".join(f"{column} = {column} - interval '{days} days'" for column in columns)
            await connection.execute(f"UPDATE job_store.{table} SET {changes}")  # noqa: S608


async def rows_of(database: Database, run_id: str) -> dict[str, int]:
    names = ("runs", "calls", "commands", "events", "messages")
    statement = "SELECT count(*) FROM job_store.{} WHERE run_id = $1"
    async with database.acquire() as connection:
        return {name: await connection.fetchval(statement.format(name), run_id) for name in names}


async def test_runs_that_a_summary_has_long_stood_for_are_removed_whole(user: User, database: Database) -> None:
    """With all their rows; what the history for the model needs stays as it was, each call with its result."""
    old = [await talk(user, "call_1"), await talk(user, "call_2")]
    cancelled = await user.start(conversation_id="thread")
    await cancelled.commit(state=run_pb2.RUN_STATE_FAILED, failure=run_pb2.RunFailure(reason="INTERNAL"))
    kept = await talk(user, "call_3", summarised_to=5)
    await age(database)
    active = await user.start("and now?", conversation_id="thread")
    before = await active.load()

    await sweep(database).sweep()

    for owner in [*old, cancelled]:
        assert set((await rows_of(database, owner.run_id)).values()) == {0}
        with pytest.raises(RunNotFound):
            await user.run(owner.run_id)
        with pytest.raises(RunNotFound):
            await user.events(owner.run_id)
    with pytest.raises(CallNotFound):
        await user.ask("GetCall", call_id="call_1")
    after = await active.load()
    assert (after.messages, after.calls) == (before.messages, before.calls)
    assert [call.call_id for call in after.calls if call.HasField("result")] == ["call_3"]
    assert (await user.run(kept.run_id)).state == run_pb2.RUN_STATE_COMPLETED


async def test_a_run_of_which_a_message_is_still_needed_stays_whole(user: User, database: Database) -> None:
    first, second = await talk(user, "call_1"), await talk(user, "call_2")
    # It stands for the question of the second run, and not for its answer.
    third = await talk(user, "call_3", summarised_to=3)
    await age(database)
    await sweep(database).sweep()
    assert (await rows_of(database, first.run_id))["runs"] == 0
    assert (await rows_of(database, second.run_id))["messages"] == 2
    fourth = await talk(user, "call_4", summarised_to=7)
    await age(database)
    await sweep(database).sweep()
    assert [(await rows_of(database, owner.run_id))["runs"] for owner in (second, third, fourth)] == [0, 0, 1]


async def test_a_run_that_waited_while_the_summary_was_made_is_kept(user: User, database: Database) -> None:
    """It has no message in the history, and may have ended a moment ago."""
    first = await talk(user, "call_1")
    active = await user.start("a question", conversation_id="thread")
    waiting = (await user.submit("and then", conversation_id="thread")).run
    await active.commit(
        messages=[message_pb2.Message(role=message_pb2.ROLE_SUMMARY, text="So far.", summarised_to_number=2)]
    )
    await age(database)
    await user.cancel(waiting.run_id)
    await sweep(database).sweep()
    assert (await user.run(waiting.run_id)).state == run_pb2.RUN_STATE_CANCELLED
    assert (await user.run(active.run_id)).state == run_pb2.RUN_STATE_RUNNING
    assert (await rows_of(database, first.run_id))["runs"] == 0


async def test_a_long_thread_goes_in_several_transactions_each_bounded(user: User, database: Database) -> None:
    old = [await talk(user, f"call_{number}") for number in range(5)]
    await talk(user, "call_last", summarised_to=10)
    await age(database)
    retention, rounds = PostgresRetention(database), 0
    while removed := await retention.remove_summarised(older_than_seconds=30 * DAY_SECONDS, rows_max=6):
        rounds += 1
        assert removed <= 6 * 5
    assert rounds > 3
    assert [(await rows_of(database, owner.run_id))["runs"] for owner in old] == [0] * 5
    assert await retention.remove_summarised(older_than_seconds=30 * DAY_SECONDS, rows_max=6) == 0


async def test_of_a_run_that_is_being_removed_nobody_sees_a_part(user: User, database: Database) -> None:
    """Else a run could be undone again whose undo is half gone."""
    old = [await talk(user, f"call_{number}") for number in range(5)]
    await talk(user, "call_last", summarised_to=10)
    await age(database)
    await PostgresRetention(database).remove_summarised(older_than_seconds=30 * DAY_SECONDS, rows_max=6)
    left = [owner for owner in old if (await rows_of(database, owner.run_id))["runs"]]
    assert left
    for owner in left:
        with pytest.raises(RunNotFound):
            await user.run(owner.run_id)
        with pytest.raises(RunNotFound):
            await user.ask("ListCalls", run_id=owner.run_id)


async def test_commands_go_with_the_log_of_their_run(user: User, database: Database) -> None:
    """A run that the history needs may have had very many; sent again they come too late, as to any run that ended."""
    owner = await talk(user, "call_1")
    await age(database, days=8)
    async with database.acquire() as connection:
        await connection.execute("DELETE FROM job_store.outbox")
    await sweep(database).sweep()
    assert await rows_of(database, owner.run_id) == {"runs": 1, "calls": 1, "commands": 0, "events": 1, "messages": 2}
    again = await user.send(owner.run_id, "cmd_call_1", steer=pb.SteerCommand(text="hi"))
    assert (again.outcome, again.reason) == (pb.COMMAND_OUTCOME_LATE, "RUN_ENDED")
