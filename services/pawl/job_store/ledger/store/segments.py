"""Reads the messages of forks from PostgreSQL. Messages up to the fork point belong to other conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.job_store.ledger.reading import Page
from pawl.job_store.ledger.rules.prefix import PrefixCounts
from pawl.job_store.ledger.rules.rows import MessageRow, Segment
from pawl.job_store.ledger.store import run_lists, tables
from pawl.server.db.database import Connection

# The statements are built only from constants in this package.
# ruff: noqa: S608

NUMBER_MAX: Final = 2**63 - 1

# Maximum size of other users' messages that are read for a run, including images and documents it does not see.
OTHERS_BYTES_MAX: Final = 16 * 1024 * 1024

_SEGMENTS: Final = """
SELECT first_number, last_number, source_conversation_id FROM job_store.conversation_segments
WHERE store_id = $1 AND conversation_id = $2 ORDER BY first_number
"""


def _parts(store_id: str, conversation_id: str, past_number: str) -> str:
    return f"""
    SELECT source_conversation_id AS part_id, first_number, last_number FROM job_store.conversation_segments
    WHERE store_id = {store_id} AND conversation_id = {conversation_id}
    UNION ALL SELECT {conversation_id}, {past_number} + 1, {NUMBER_MAX}
    """


def visible(source: str, author: str) -> str:
    """Return a statement for the messages that a run sees: all messages by `author`, and the newest by other users.

    Other users' messages are limited to the newest complete runs that fit into `OTHERS_BYTES_MAX`, because the author
    may have no summary that covers them.
    """
    return f"""
    SELECT {tables.MESSAGES.names} FROM (
        SELECT *, sum(length(body)) FILTER (WHERE user_id <> {author}) OVER (ORDER BY last_number DESC) AS others_bytes
        FROM (SELECT m.*, max(number) OVER (PARTITION BY run_id) AS last_number {source}) AS of_runs
    ) AS counted
    WHERE user_id = {author} OR others_bytes <= {OTHERS_BYTES_MAX} ORDER BY number
    """


_IS_IN: Final = "m.store_id = {} AND m.conversation_id = p.part_id AND m.number BETWEEN {} AND p.last_number"
_MESSAGES: Final = run_lists.statement(
    tables.MESSAGES,
    source=f"""(
        SELECT each.* FROM ({_parts("$3", "$4::text", "$5::bigint")}) AS p CROSS JOIN LATERAL (
            SELECT store_id, conversation_id, number, body FROM job_store.messages AS m
            WHERE {_IS_IN.format("$3", "greatest(p.first_number, $6::bigint + 1)")} ORDER BY number LIMIT $1
        ) AS each
    )""",
    where="true",
    order="number",
    size="length(body)",
)
# An author's newest summary within the parts. Summaries written after the fork point do not count.
_SUMMARY: Final = f"""
SELECT coalesce(max(m.summarised_to), 0) AS end_number FROM parts AS p CROSS JOIN LATERAL (
    SELECT summarised_to, user_id, number FROM job_store.messages AS m
    WHERE {_IS_IN.format("$1", "p.first_number")} AND m.summarised_to > 0 OFFSET 0
) AS m
WHERE m.user_id = """
_FROM_SUMMARY_SOURCE: Final = f"""FROM parts AS p CROSS JOIN summary AS s CROSS JOIN LATERAL (
    SELECT * FROM job_store.messages AS m
    WHERE {_IS_IN.format("$1", "greatest(p.first_number, s.end_number + 1, $5 + 1)")} OFFSET 0
) AS m
WHERE (m.summarised_to = 0 OR m.user_id = $4) AND m.number <= $6"""
_FROM_SUMMARY: Final = f"""
WITH parts AS MATERIALIZED ({_parts("$1", "$2::text", "$3::bigint")}),
    summary AS MATERIALIZED ({_SUMMARY}$4 AND m.number <= $6)
{visible(_FROM_SUMMARY_SOURCE, "$4")}
"""
_COUNTS: Final = f"""
WITH parts AS MATERIALIZED ({_parts("$1", "$2::text", "$3::bigint")}), summary AS MATERIALIZED ({_SUMMARY}$4)
SELECT s.end_number, k.* FROM summary AS s CROSS JOIN LATERAL (
    SELECT count(*) AS message_count, count(*) FILTER (WHERE m.user_id = $4) AS own_count,
           max(m.message_id) FILTER (WHERE m.number = $5) AS last_message_id
    FROM parts AS p CROSS JOIN LATERAL (
        SELECT number, message_id, user_id FROM job_store.messages AS m
        WHERE {_IS_IN.format("$1", "greatest(p.first_number, s.end_number + 1)")} AND m.number <= $5 OFFSET 0
    ) AS m
) AS k
"""
_KEPT: Final = f"""
WITH parts AS MATERIALIZED (
    SELECT unnest($2::text[]) AS part_id, unnest($3::bigint[]) AS first_number, unnest($4::bigint[]) AS last_number
), summary AS MATERIALIZED ({_SUMMARY}'')
SELECT s.end_number, (
    SELECT count(*) FROM parts AS p CROSS JOIN LATERAL (
        SELECT FROM job_store.messages AS m
        WHERE {_IS_IN.format("$1", "greatest(p.first_number, s.end_number + 1)")} OFFSET 0
    ) AS m
) FROM summary AS s
"""


class AuthorView(NamedTuple):
    """A conversation as the runs of one user see it. `past_number` is 0 unless the conversation is a fork."""

    store_id: StoreId
    conversation_id: ConversationId
    past_number: int
    author: UserId


async def of(connection: Connection, store_id: StoreId, conversation_id: ConversationId) -> tuple[Segment, ...]:
    """Return the segments of a fork in order, or an empty tuple if the conversation is not a fork."""
    return tuple(Segment(**dict(record)) for record in await connection.fetch(_SEGMENTS, store_id, conversation_id))


async def messages(
    connection: Connection,
    store_id: StoreId,
    conversation_id: ConversationId,
    past_number: int,
    *,
    after: int,
    rows_max: int,
) -> Page[MessageRow]:
    arguments = (store_id, conversation_id, past_number, after)
    return await run_lists.fetch(connection, _MESSAGES, arguments, tables.MESSAGES.read, rows_max=rows_max)


async def from_summary(connection: Connection, view: AuthorView, *, after: int, last_number: int) -> list[MessageRow]:
    records = await connection.fetch(_FROM_SUMMARY, *view, after, last_number)
    return [tables.MESSAGES.read(record) for record in records]


async def counts(connection: Connection, view: AuthorView, *, last_number: int) -> PrefixCounts:
    """Return the counts of a history up to a message number. The conversation need not be a fork."""
    (record,) = await connection.fetch(_COUNTS, *view, last_number)
    return PrefixCounts(**dict(record))


async def kept(connection: Connection, store_id: StoreId, path: Sequence[Segment]) -> tuple[int, int]:
    """Return the last message number that the user's newest summary on a path covers, and how many messages follow."""
    columns = zip(*((each.source_conversation_id, each.first_number, each.last_number) for each in path), strict=True)
    record = await connection.fetchrow(_KEPT, store_id, *map(list, columns))
    return (0, 0) if record is None else (record[0], record[1])
