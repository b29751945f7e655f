"""Creates very many runs with SQL, as copies of one real conversation under new ids.

All rows are copied, and the ids in opaque columns are replaced too, so a copy can be claimed, loaded, answered and
completed like the original. The log is not copied, so a copy has no earlier events.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import asyncpg

# The statements contain only constants and validated ids.
# ruff: noqa: S608

_TABLES: Final = ("conversations", "messages", "runs", "calls")
_ID: Final = re.compile(r"[a-z]+_[0-9a-z]{26,32}")
# Number of an id's digits that hold the number of the copy. The other digits keep the ids within a copy distinct.
_NUMBER_DIGITS: Final = 8

_COLUMNS: Final = """
SELECT column_name FROM information_schema.columns
WHERE table_schema = 'job_store' AND table_name = $1 AND is_generated = 'NEVER' ORDER BY ordinal_position
"""
_IDS: Final = """
SELECT conversation_id AS id FROM job_store.conversations WHERE store_id = $1 AND conversation_id = $2
UNION SELECT run_id FROM job_store.runs WHERE store_id = $1 AND conversation_id = $2
UNION SELECT message_id FROM job_store.messages WHERE store_id = $1 AND conversation_id = $2
UNION SELECT call_id FROM job_store.calls WHERE store_id = $1 AND conversation_id = $2
"""


def copied_id(original: str, number: int) -> str:
    """Return the id that replaces `original` in copy `number`. It has the same length."""
    prefix, _, digits = original.partition("_")
    return f"{prefix}_{number:0{_NUMBER_DIGITS}}{digits[_NUMBER_DIGITS:]}"


def copied_store(number: int, stores: int) -> str:
    """Return the store of copy `number`, if the copies are spread over `stores` stores."""
    return f"copy-{number % stores:06}"


async def copy_conversation(
    connection: asyncpg.Connection, store_id: str, run_id: str, *, count: int, stores: int, users: int = 1
) -> None:
    """Copy the conversation of a run `count` times, spread over several stores and users, and run ANALYZE.

    Copies are numbered from 1 to `count` (see `copied_id` and `copied_store`). Atomic.
    """
    conversation_id = await connection.fetchval(
        "SELECT conversation_id FROM job_store.runs WHERE store_id = $1 AND run_id = $2", store_id, run_id
    )
    ids = [record["id"] for record in await connection.fetch(_IDS, store_id, conversation_id)]
    if odd := [name for name in ids if not _ID.fullmatch(name)]:
        raise ValueError(f"these ids cannot be distinguished from other text: {odd}")
    async with connection.transaction():
        for table in _TABLES:
            columns = [record["column_name"] for record in await connection.fetch(_COLUMNS, table)]
            await connection.execute(
                _copy(table, columns, ids), store_id, conversation_id, count, stores, users, timeout=600
            )
    for table in _TABLES:
        await connection.execute(f"ANALYZE job_store.{table}")


async def forget_all(connection: asyncpg.Connection) -> None:
    """Delete all runs and conversations."""
    await connection.execute("TRUNCATE job_store.runs, job_store.messages, job_store.calls")
    await connection.execute("TRUNCATE job_store.conversations, job_store.conversation_words")
    await connection.execute("TRUNCATE job_store.commands, job_store.events, job_store.requests, job_store.outbox")


def _copy(table: str, columns: Sequence[str], ids: Sequence[str]) -> str:
    """Return the statement that copies the rows of a table as text and replaces the ids in that text."""
    row = "original.row"
    for name in ids:
        prefix, _, digits = name.partition("_")
        copy = f"'{prefix}_' || lpad(n::text, {_NUMBER_DIGITS}, '0') || '{digits[_NUMBER_DIGITS:]}'"
        row = f"replace({row}, '{name}', {copy})"
        # In the text, opaque columns are hexadecimal digits.
        row = f"replace({row}, '{name.encode().hex()}', encode(convert_to({copy}, 'UTF8'), 'hex'))"
    row = f"""regexp_replace({row}, '"store_id":"[^"]*"', '"store_id":"copy-' || lpad((n % $4)::text, 6, '0') || '"')"""
    row = f"""regexp_replace({row}, '"user_id":"[^"]*"', '"user_id":"user-' || (n / $4 % $5)::text || '"')"""
    names = ", ".join(f'"{column}"' for column in columns)
    values = ", ".join(f'copy."{column}"' for column in columns)
    return f"""
        INSERT INTO job_store.{table} ({names})
        SELECT {values}
        FROM generate_series(1, $3::integer) AS n
        CROSS JOIN (
            SELECT row_to_json(t)::text AS row FROM job_store.{table} AS t
            WHERE t.store_id = $1 AND t.conversation_id = $2
        ) AS original
        CROSS JOIN LATERAL json_populate_record(NULL::job_store.{table}, {row}::json) AS copy
    """
