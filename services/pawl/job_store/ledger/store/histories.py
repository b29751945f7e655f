"""Reads the history that is loaded with a run: the messages after the newest summary, and their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypedDict

from pawl.chassis.ids import RunId
from pawl.job_store.ledger.rules import prefix
from pawl.job_store.ledger.rules.prefix import HistoryPrefix
from pawl.job_store.ledger.rules.rows import CallRow, MessageRow, RunRow
from pawl.job_store.ledger.store import segments, tables
from pawl.server.db.database import Connection

# The statements are built only from constants in this package.
# ruff: noqa: S608

# Summaries can reveal calls, so other users' summaries are left out.
_MESSAGES_FROM_SUMMARY: Final = segments.visible(
    """FROM job_store.messages AS m
    WHERE store_id = $1 AND conversation_id = $2 AND (summarised_to = 0 OR user_id = $3) AND number > $4 AND number > (
        SELECT coalesce(max(summarised_to), 0) FROM job_store.messages
        WHERE store_id = $1 AND conversation_id = $2 AND summarised_to > 0 AND user_id = $3 AND number <= $5
    ) AND number <= $5""",
    "$3",
)
# The newest calls get their results first, up to this size. Some runs are loaded with only their open calls
# and the calls of their last round.
_LOADED_RESULTS_BYTES_MAX: Final = 16 * 1024 * 1024
_CALLS_OF_RUNS: Final = f"""
SELECT {tables.CALLS.names.replace(" result,", " CASE WHEN bytes_so_far <= $3 THEN result END AS result,")},
       CASE WHEN bytes_so_far > $3 THEN length(result) END AS omitted_bytes
FROM (
    SELECT *, sum(coalesce(length(result), 0)) OVER (
        ORDER BY create_time DESC, round DESC, batch_index DESC, call_id DESC
    ) AS bytes_so_far
    FROM job_store.calls WHERE store_id = $1 AND run_id = ANY ($2::text[]) AND (round >= $4 OR state < 10)
) AS c
ORDER BY create_time, round, batch_index, call_id
"""
_FAILURES: Final = """
SELECT run_id, failure FROM job_store.runs WHERE store_id = $1 AND run_id = ANY ($2::text[]) AND state = 11
"""


class HistoryFields(TypedDict):
    known: HistoryPrefix | None
    messages: Sequence[MessageRow]
    calls: Sequence[CallRow]
    omitted_bytes: Mapping[str, int]
    failures: Mapping[RunId, bytes]


async def load(
    connection: Connection, run: RunRow, view: segments.AuthorView, known: HistoryPrefix | None, last_number: int = 0
) -> HistoryFields:
    """Read the history up to the message `last_number`; 0 means all."""
    if known:
        found = await segments.counts(connection, view, last_number=known.last_number)
        # A job is loaded with its last calls only.
        known = known if prefix.is_valid(known, found) and not run.reports_to else None
    messages = await from_summary(connection, view, after=known.last_number if known else 0, last_number=last_number)
    run_ids = {message.run_id for message in messages if message.user_id == view.author}
    others = list(run_ids - {run.run_id})
    records = await connection.fetch(_FAILURES, run.store_id, others) if others else []
    failures = {record["run_id"]: record["failure"] for record in records}
    # Without a step the run has no calls.
    run_ids = {*others, run.run_id} if run.last_commit else {*others}
    bytes_max = _LOADED_RESULTS_BYTES_MAX - (known.result_bytes if known else 0)
    calls_of = (run.store_id, list(run_ids), bytes_max, run.loaded_from_round)
    records = await connection.fetch(_CALLS_OF_RUNS, *calls_of) if run_ids else []
    omitted_bytes = {record["call_id"]: record["omitted_bytes"] or 0 for record in records}
    if known and any(omitted_bytes.values()):
        return await load(connection, run, view, None)
    calls = [tables.CALLS.read(record) for record in records]
    return HistoryFields(known=known, messages=messages, calls=calls, omitted_bytes=omitted_bytes, failures=failures)


async def from_summary(
    connection: Connection, view: segments.AuthorView, *, after: int, last_number: int = 0
) -> list[MessageRow]:
    last_number = last_number or segments.NUMBER_MAX
    if view.past_number:
        return await segments.from_summary(connection, view, after=after, last_number=last_number)
    arguments = (view.store_id, view.conversation_id, view.author, after, last_number)
    records = await connection.fetch(_MESSAGES_FROM_SUMMARY, *arguments)
    return [tables.MESSAGES.read(record) for record in records]
