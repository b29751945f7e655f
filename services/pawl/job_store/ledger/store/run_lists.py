"""Builds the statements that list a user's runs, one per index and order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar

from asyncpg import Record

from pawl.chassis.ids import DEFAULT_AGENT, StoreId, UserId
from pawl.job_store.ledger.reading import Page, RunFilter
from pawl.job_store.ledger.rules import labels
from pawl.job_store.ledger.rules.command import Cancel
from pawl.job_store.ledger.store import tables
from pawl.server.db.database import Connection, Database
from pawl.values import CommandOutcome, RunState, StopCause

R = TypeVar("R")

# A page that has reached this size accepts no more rows.
PAGE_BYTES_MAX: Final = 2 * 1024 * 1024


class Rows(Protocol):
    @property
    def table(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def names(self) -> str: ...


def statement(rows: Rows, *, where: str, order: str, size: str, source: str = "") -> str:
    """Return a statement that reads a page of rows.

    $1 is the row limit plus one, and $2 is the byte limit. The other arguments belong to `where`.

    This function's own arguments must be constants, not user input. If `source` is given, it is searched instead of the
    whole table.
    """
    return f"""
        WITH sized AS MATERIALIZED (
            SELECT {rows.key}, sum({size}) OVER (ORDER BY {order}) - ({size}) AS bytes_before
            FROM {source or rows.table} AS t WHERE {where} ORDER BY {order} LIMIT $1
        )
        SELECT {rows.names}, (SELECT count(*) FROM sized) AS found
        FROM {rows.table} JOIN sized USING ({rows.key}) WHERE bytes_before < $2 ORDER BY {order}
        """


async def fetch(
    database: Database | Connection, sql: str, arguments: Sequence[Any], read: Callable[[Record], R], *, rows_max: int
) -> Page[R]:
    """Run `sql`, which `statement` built, and return a page. If any row matches, the page has at least one.

    Records have the additional column `found`.
    """
    records = await database.fetch(sql, rows_max + 1, PAGE_BYTES_MAX, *arguments)
    found = records[0]["found"] if records else 0
    rows = [read(record) for record in records[:rows_max]]
    return Page(rows=rows, has_more=found > len(rows))


# The statements are built only from constants in this package.
# ruff: noqa: S608

# The same expression as in the index.
_HAS_LABELS: Final = r"labels <> '' AND string_to_array(labels, E'\n') @> $12"
_FILTERS: Final = f"""NOT imported AND ($5 = '' OR conversation_id = $5)
    AND (cardinality($6::smallint[]) = 0 OR state = ANY ($6))
    AND ($10 = '' OR parent_run_id = $10) AND ($11 = '' OR agent_name = $11) AND ($14 = '' OR reports_to = $14)
    AND (NOT $15 OR reports_to <> '')
    AND (cardinality($12::text[]) = 0 OR {_HAS_LABELS})
    AND (cardinality($13::bytea[]) = 0 OR EXISTS (SELECT FROM unnest($13) AS kind WHERE position(kind IN waits) > 0))"""
# The condition for each index. The filters above are applied to the rows it finds.
_ALONG: Final = {
    "runs_of_user": "true",
    "runs_of_conversation": "conversation_id = $5",
    "runs_of_parent": "parent_run_id <> '' AND parent_run_id = $10",
    "runs_of_agent": f"agent_name <> '{DEFAULT_AGENT}' AND agent_name = $11",
    "runs_labels": _HAS_LABELS,
    "runs_jobs": "reports_to <> '' AND reports_to = $14",
    "runs_jobs_of_user": "reports_to <> ''",
}


def _running_or_stopped(cause: StopCause) -> str:
    """Return the SQL condition for open runs that are not being stopped, and for runs that command $16 stopped.

    The command is looked up separately for each run, because many commands may have this id.
    """
    return f"""(state < 10 AND stop_cause IS NULL OR stop_cause = {cause} AND EXISTS (
        SELECT FROM job_store.commands AS c WHERE c.store_id = t.store_id AND c.run_id = t.run_id
        AND c.command_id = $16 AND c.name = '{Cancel.name}' AND c.outcome = {CommandOutcome.ACCEPTED} OFFSET 0
    ))"""


def _between(*, oldest_first: bool) -> str:
    behind, near, far = (">", "-infinity", "<") if oldest_first else ("<", "infinity", ">=")
    far_end = "infinity" if oldest_first else "-infinity"
    return f"""(create_time, run_id) {behind} (coalesce($7::timestamptz, '{near}'), $8)
        AND create_time {far} coalesce($9::timestamptz, '{far_end}')"""


def _order(*, oldest_first: bool) -> str:
    direction = "ASC" if oldest_first else "DESC"
    return f"create_time {direction}, run_id {direction}"


def _along(found_by: str, *, oldest_first: bool, of: str = "user_id = $4") -> str:
    return statement(
        tables.RUNS,
        where=f"""store_id = $3 AND {of} AND {found_by} AND {_FILTERS}
            AND {_between(oldest_first=oldest_first)}""",
        order=_order(oldest_first=oldest_first),
        size=tables.RUN_BYTES,
    )


def _in_states(*, oldest_first: bool) -> str:
    return statement(
        tables.RUNS,
        source=f"""(
            SELECT r.* FROM unnest($6::smallint[]) AS s (one) CROSS JOIN LATERAL (
                SELECT store_id, run_id, create_time, options, tools, output, own_tools FROM job_store.runs
                WHERE store_id = $3 AND user_id = $4 AND state = s.one AND {_FILTERS}
                AND {_between(oldest_first=oldest_first)}
                ORDER BY {_order(oldest_first=oldest_first)} LIMIT $1
            ) AS r
        )""",
        where="true",
        order=_order(oldest_first=oldest_first),
        size=tables.RUN_BYTES,
    )


# The statements by index, and by whether the oldest run comes first.
LISTS: Final[Mapping[str, Mapping[bool, str]]] = {
    **{
        index: {each: _along(found_by, oldest_first=each) for each in (False, True)}
        for index, found_by in _ALONG.items()
    },
    # Rarely used, and only by operators: these statements search all the store's jobs.
    "running_jobs_of_store": {
        each: _along(f"reports_to <> '' AND {_running_or_stopped(StopCause.OPERATOR)}", oldest_first=each, of="$4 = ''")
        for each in (False, True)
    },
    "runs_jobs_stopped_by": {
        each: _along(f"{_ALONG['runs_jobs']} AND {_running_or_stopped(StopCause.USER)}", oldest_first=each)
        for each in (False, True)
    },
    "runs_of_user_in_state": {each: _in_states(oldest_first=each) for each in (False, True)},
}


def _index(wanted: RunFilter) -> str:
    if wanted.running_jobs_of_store:
        return "running_jobs_of_store"
    if wanted.reports_to:
        return "runs_jobs_stopped_by" if wanted.stopped_by else "runs_jobs"
    if wanted.parent_run_id:
        return "runs_of_parent"
    if wanted.conversation_id:
        return "runs_of_conversation"
    if wanted.labels:
        return "runs_labels"
    is_open = bool(wanted.waits) or not any(state.is_terminal for state in wanted.states)
    if wanted.agent_name not in ("", DEFAULT_AGENT) and not (wanted.states and is_open):
        return "runs_of_agent"
    if wanted.jobs_only and not (wanted.states and is_open):
        return "runs_jobs_of_user"
    return "runs_of_user_in_state" if wanted.states or wanted.waits else "runs_of_user"


def selected(
    store_id: StoreId, user_id: UserId, wanted: RunFilter, after: tuple[datetime, str] | None
) -> tuple[str, tuple[Any, ...]]:
    near, far = wanted.create_time_before, wanted.create_time_from
    if wanted.oldest_first:
        near, far = far, near
    # The empty id sorts before all others, so a time alone is also a position.
    position = after or (near, "")
    arguments: tuple[Any, ...] = (
        store_id,
        user_id,
        wanted.conversation_id,
        [RunState.WAITING] if wanted.waits else list(wanted.states),
        *position,
        far,
        wanted.parent_run_id,
        wanted.agent_name,
        labels.lines(store_id, user_id, dict(wanted.labels)),
        [bytes([kind]) for kind in wanted.waits],
        wanted.reports_to,
        wanted.jobs_only,
    )
    if wanted.stopped_by or wanted.running_jobs_of_store:
        arguments = (*arguments, wanted.stopped_by)
    return LISTS[_index(wanted)][wanted.oldest_first], arguments
