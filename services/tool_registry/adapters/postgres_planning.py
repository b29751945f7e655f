"""Projects and tasks in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Final

import asyncpg

from services.chassis.database import Database
from services.tool_registry.domain.planning import Project, Task

_TASK_COLUMNS: Final = "task_id, project_id, parent_task_id, title, notes, due"

# The key comes back also where a call before this one, or one at the same time, has made the row.
_ADD_PROJECT: Final = """
INSERT INTO tool_registry.projects (store_id, user_id, project_id, title) VALUES ($1, $2, $3, $4)
ON CONFLICT (store_id, user_id, lower(title)) DO UPDATE SET title = projects.title
RETURNING project_id, title
"""
_ADD_TASK: Final = f"""
INSERT INTO tool_registry.tasks
    (store_id, user_id, task_id, project_id, parent_task_id, title, notes, due, idempotency_key)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
ON CONFLICT (store_id, user_id, idempotency_key) DO UPDATE SET title = tasks.title
RETURNING {_TASK_COLUMNS}
"""  # noqa: S608  # constants only
_PROJECTS: Final = """
SELECT project_id, title FROM tool_registry.projects WHERE store_id = $1 AND user_id = $2
ORDER BY created_at, project_id LIMIT $3
"""
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


class PostgresPlanBook:
    """The PlanBook port of the planning tools."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add_project(self, store_id: str, user_id: str, project: Project) -> Project:
        async with self._database.acquire() as connection:
            row = await connection.fetchrow(_ADD_PROJECT, store_id, user_id, project.project_id, project.title)
        return project if row is None else _project(row)

    async def add_task(self, store_id: str, user_id: str, task: Task, *, idempotency_key: str) -> Task:
        async with self._database.acquire() as connection:
            row = await connection.fetchrow(
                _ADD_TASK,
                store_id,
                user_id,
                task.task_id,
                task.project_id,
                task.parent_task_id,
                task.title,
                task.notes,
                None if task.due is None else date.fromisoformat(task.due),
                idempotency_key,
            )
        return task if row is None else _task(row)

    async def projects(self, store_id: str, user_id: str, most: int) -> Sequence[Project]:
        async with self._database.acquire() as connection:
            return [_project(row) for row in await connection.fetch(_PROJECTS, store_id, user_id, most)]

    async def tasks(self, store_id: str, user_id: str, most: int) -> Sequence[Task]:
        async with self._database.acquire() as connection:
            return [_task(row) for row in await connection.fetch(_TASKS, store_id, user_id, most)]

    async def find_tasks(self, store_id: str, user_id: str, reference: str) -> Sequence[Task]:
        async with self._database.acquire() as connection:
            return [_task(row) for row in await connection.fetch(_BY_REFERENCE, store_id, user_id, reference)]

    async def task_titles(self, store_id: str, user_id: str) -> Sequence[str]:
        async with self._database.acquire() as connection:
            return [row["title"] for row in await connection.fetch(_TITLES, store_id, user_id)]


def _project(row: asyncpg.Record) -> Project:
    return Project(project_id=row["project_id"], title=row["title"])


def _task(row: asyncpg.Record) -> Task:
    return Task(
        task_id=row["task_id"],
        project_id=row["project_id"],
        parent_task_id=row["parent_task_id"],
        title=row["title"],
        notes=row["notes"],
        due=None if row["due"] is None else row["due"].isoformat(),
    )
