"""Stores projects and tasks in PostgreSQL."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import asyncpg
import msgspec

from pawl.server.db.database import Connection, DatabaseAdapter
from pawl.tool_registry.builtin.planning.rules import Comment, Owner, PlanChange, Project, Task
from pawl.tools.sdk.context import ToolError

_TASK_COLUMNS: Final = (
    "task_id, project_id, parent_task_id, title, notes, to_char(due, 'YYYY-MM-DD') AS due, is_done, run_id"
)
_PROJECT_COLUMNS: Final = "project_id, title, status, notes"

# DO UPDATE, so that RETURNING also returns a row that an earlier or concurrent call inserted.
_ADD_PROJECT: Final = f"""
INSERT INTO tool_registry.projects (store_id, user_id, project_id, title) VALUES ($1, $2, $3, $4)
ON CONFLICT (store_id, user_id, lower(title)) DO UPDATE SET title = projects.title
RETURNING {_PROJECT_COLUMNS}
"""  # noqa: S608  # constants only
_ADD_TASK: Final = f"""
INSERT INTO tool_registry.tasks
    (store_id, user_id, task_id, project_id, parent_task_id, title, notes, due, run_id, idempotency_key)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8::text::date, $9, $10)
ON CONFLICT (store_id, user_id, idempotency_key) DO UPDATE SET title = tasks.title
RETURNING {_TASK_COLUMNS}
"""  # noqa: S608  # constants only
_PROJECTS: Final = f"""
SELECT {_PROJECT_COLUMNS} FROM tool_registry.projects WHERE store_id = $1 AND user_id = $2
ORDER BY created_at, project_id LIMIT $3
"""  # noqa: S608  # constants only
_TASKS: Final = f"""
SELECT {_TASK_COLUMNS} FROM tool_registry.tasks WHERE store_id = $1 AND user_id = $2 ORDER BY position LIMIT $3
"""  # noqa: S608  # constants only
_BY_REFERENCE: Final = f"""
SELECT {_TASK_COLUMNS} FROM tool_registry.tasks
WHERE store_id = $1 AND user_id = $2 AND (task_id = $3 OR lower(title) = lower($3))
ORDER BY task_id = $3 DESC, position DESC LIMIT 100
"""  # noqa: S608  # constants only
_TITLES: Final = """
SELECT title FROM tool_registry.tasks WHERE store_id = $1 AND user_id = $2
GROUP BY title ORDER BY max(position) DESC LIMIT 500
"""
_EARLIER: Final = """
SELECT change FROM tool_registry.plan_changes
WHERE (store_id, user_id) IS NOT DISTINCT FROM ($1, $2) AND idempotency_key = $3
"""
_WRITE_CHANGE: Final = """
WITH old AS (
    DELETE FROM tool_registry.plan_changes
    WHERE store_id = $1 AND user_id = $2 AND created_at < now() - interval '30 days' AND idempotency_key <> $3)
INSERT INTO tool_registry.plan_changes (store_id, user_id, idempotency_key, change) VALUES ($1, $2, $3, $4)
"""
_LOCK_PROJECT: Final = f"""
SELECT {_PROJECT_COLUMNS} FROM tool_registry.projects
WHERE store_id = $1 AND user_id = $2 AND project_id = $3 FOR UPDATE
"""  # noqa: S608  # constants only
_SET_PROJECT: Final = """
UPDATE tool_registry.projects SET title = $4, status = $5, notes = $6
WHERE store_id = $1 AND user_id = $2 AND project_id = $3
"""
# Locked in order, so that two calls that change the same tasks do not deadlock.
_LOCK_TASKS: Final = f"""
SELECT {_TASK_COLUMNS} FROM tool_registry.tasks
WHERE store_id = $1 AND user_id = $2 AND task_id = ANY ($3::text[]) ORDER BY task_id FOR UPDATE
"""  # noqa: S608  # constants only
_SET_TASK: Final = """
UPDATE tool_registry.tasks SET title = $4, notes = $5, due = $6::text::date, is_done = $7
WHERE store_id = $1 AND user_id = $2 AND task_id = $3
"""
_BELOW: Final = """
WITH RECURSIVE below AS (
    SELECT task_id FROM tool_registry.tasks WHERE store_id = $1 AND user_id = $2 AND task_id = $3
    UNION
    SELECT t.task_id FROM below b
    JOIN tool_registry.tasks t ON t.store_id = $1 AND t.user_id = $2 AND t.parent_task_id = b.task_id)
SELECT task_id FROM below
"""
_REMOVE_TASKS: Final = """
DELETE FROM tool_registry.tasks WHERE store_id = $1 AND user_id = $2 AND task_id = ANY ($3::text[])
"""
_COMMENT_COLUMNS: Final = """comment_id, task_id, project_id, content,
    to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') AS created"""
_ADD_COMMENT: Final = f"""
INSERT INTO tool_registry.comments (store_id, user_id, comment_id, task_id, project_id, content, idempotency_key)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (store_id, user_id, idempotency_key) DO UPDATE SET content = comments.content
RETURNING {_COMMENT_COLUMNS}
"""  # noqa: S608  # constants only
_COMMENTS: Final = f"""
SELECT {_COMMENT_COLUMNS} FROM tool_registry.comments WHERE store_id = $1 AND user_id = $2
ORDER BY position DESC LIMIT $3
"""  # noqa: S608  # constants only
_REMOVE_COMMENT: Final = f"""
DELETE FROM tool_registry.comments WHERE store_id = $1 AND user_id = $2 AND comment_id = $3 AND content = $4
RETURNING {_COMMENT_COLUMNS}
"""  # noqa: S608  # constants only


class PostgresPlanRepository(DatabaseAdapter):
    """Stores plans by store and user. Changes are atomic, and idempotent by key."""

    async def add_project(self, owner: Owner, project: Project) -> Project:
        """Add a project, or return the existing project with the same title (ignoring case)."""
        row = await self._database.fetchrow(_ADD_PROJECT, *owner, project.project_id, project.title)
        return project if row is None else Project(**row)

    async def add_task(self, owner: Owner, task: Task, *, idempotency_key: str) -> Task:
        """Add a task, or return the task that was added with the same key.

        Raises:
            ToolError: The parent task no longer exists.
        """
        ids = (task.task_id, task.project_id, task.parent_task_id)
        fields = (*ids, task.title, task.notes, task.due, task.run_id)
        try:
            row = await self._database.fetchrow(_ADD_TASK, *owner, *fields, idempotency_key)
        except asyncpg.ForeignKeyViolationError:
            raise ToolError(f"the task {task.parent_task_id!r} no longer exists") from None
        return task if row is None else Task(**row)

    async def projects(self, owner: Owner, most: int) -> Sequence[Project]:
        """Return the user's projects, oldest first."""
        return [Project(**row) for row in await self._database.fetch(_PROJECTS, *owner, most)]

    async def tasks(self, owner: Owner, most: int) -> Sequence[Task]:
        """Return the user's tasks and subtasks, oldest first."""
        return [Task(**row) for row in await self._database.fetch(_TASKS, *owner, most)]

    async def find_tasks(self, owner: Owner, reference: str) -> Sequence[Task]:
        """Return the task with the given id, followed by the tasks with that title (ignoring case), newest first."""
        return [Task(**row) for row in await self._database.fetch(_BY_REFERENCE, *owner, reference)]

    async def task_titles(self, owner: Owner) -> Sequence[str]:
        """Return up to 500 distinct titles of the user's tasks, newest first."""
        return [row["title"] for row in await self._database.fetch(_TITLES, *owner)]

    async def earlier_change(self, owner: Owner, *, idempotency_key: str) -> PlanChange | None:
        """Return the change that was made with this key, or None. Changes are stored for at least 30 days."""
        stored = await self._database.fetchval(_EARLIER, *owner, idempotency_key)
        return None if stored is None else msgspec.msgpack.decode(stored, type=PlanChange)

    async def change_project(
        self, owner: Owner, project_id: str, fields: Mapping[str, Any], *, idempotency_key: str
    ) -> PlanChange:
        """Set fields of a project. If the project does not exist, return an empty change.

        Raises:
            ToolError: Another project has the new title.
        """
        try:
            async with self._database.transaction() as connection:
                row = await connection.fetchrow(_LOCK_PROJECT, *owner, project_id)
                earlier = await connection.fetchval(_EARLIER, *owner, idempotency_key)
                if earlier is not None:
                    return msgspec.msgpack.decode(earlier, type=PlanChange)
                if row is None:
                    return PlanChange()
                before = Project(**row)
                after = replace(before, **fields)
                await connection.execute(_SET_PROJECT, *owner, project_id, after.title, after.status, after.notes)
                return await _written(
                    connection, owner, idempotency_key, PlanChange(project_before=before, project_after=after)
                )
        except asyncpg.UniqueViolationError:
            raise ToolError(f"the project {fields['title']!r} already exists; nothing was changed") from None

    async def change_tasks(
        self, owner: Owner, task_ids: Collection[str], fields: Mapping[str, Any], *, idempotency_key: str
    ) -> PlanChange:
        """Set fields of tasks. The returned change omits tasks that no longer exist."""
        async with self._database.transaction() as connection:
            rows = await connection.fetch(_LOCK_TASKS, *owner, sorted(task_ids))
            earlier = await connection.fetchval(_EARLIER, *owner, idempotency_key)
            if earlier is not None:
                return msgspec.msgpack.decode(earlier, type=PlanChange)
            before = {row["task_id"]: Task(**row) for row in rows}
            # In the requested order.
            found = tuple(before[task_id] for task_id in task_ids if task_id in before)
            after = tuple(replace(task, **fields) for task in found)
            await connection.executemany(
                _SET_TASK,
                [(*owner, task.task_id, task.title, task.notes, task.due, task.is_done) for task in after],
            )
            return await _written(connection, owner, idempotency_key, PlanChange(tasks_before=found, tasks_after=after))

    async def remove_task(self, owner: Owner, task_id: str, *, with_subtasks: bool, idempotency_key: str) -> PlanChange:
        """Remove a task and, with `with_subtasks`, its subtasks.

        Return an empty change if the task does not exist, or if it has subtasks and `with_subtasks` is not set.
        """
        async with self._database.transaction() as connection:
            rows = await connection.fetch(_LOCK_TASKS, *owner, [task_id])
            earlier = await connection.fetchval(_EARLIER, *owner, idempotency_key)
            if earlier is not None:
                return msgspec.msgpack.decode(earlier, type=PlanChange)
            # The foreign key blocks new subtasks of a locked task.
            while len(rows) < len(below := [row["task_id"] for row in await connection.fetch(_BELOW, *owner, task_id)]):
                if not with_subtasks:
                    return PlanChange()
                rows = await connection.fetch(_LOCK_TASKS, *owner, below)
            if not rows:
                return PlanChange()
            await connection.execute(_REMOVE_TASKS, *owner, below)
            removed = tuple(Task(**row) for row in rows)
            return await _written(connection, owner, idempotency_key, PlanChange(tasks_before=removed))

    async def add_comment(self, owner: Owner, comment: Comment, *, idempotency_key: str) -> Comment:
        """Add a comment, or return the comment that was added with this key.

        Raises:
            ToolError: The task no longer exists.
        """
        fields = (comment.comment_id, comment.task_id, comment.project_id, comment.content)
        try:
            (row,) = await self._database.fetch(_ADD_COMMENT, *owner, *fields, idempotency_key)
        except asyncpg.ForeignKeyViolationError:
            raise ToolError("the task no longer exists; nothing was added") from None
        return Comment(**row)

    async def comments(self, owner: Owner, most: int) -> Sequence[Comment]:
        """Return the user's newest comments, oldest first."""
        return [Comment(**row) for row in reversed(await self._database.fetch(_COMMENTS, *owner, most))]

    async def remove_comment(self, owner: Owner, comment_id: str, content: str, *, idempotency_key: str) -> PlanChange:
        """Remove a comment. If there is no comment with this id and content, return an empty change."""
        async with self._database.transaction() as connection:
            row = await connection.fetchrow(_REMOVE_COMMENT, *owner, comment_id, content)
            if row is None:
                # A concurrent execution of the call may have removed it.
                earlier = await connection.fetchval(_EARLIER, *owner, idempotency_key)
                return PlanChange() if earlier is None else msgspec.msgpack.decode(earlier, type=PlanChange)
            return await _written(connection, owner, idempotency_key, PlanChange(comment_before=Comment(**row)))


async def _written(connection: Connection, owner: Owner, key: str, change: PlanChange) -> PlanChange:
    await connection.execute(_WRITE_CHANGE, *owner, key, msgspec.msgpack.encode(change))
    return change
