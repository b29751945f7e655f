"""Projects, tasks and subtasks: what the planning tools keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pawl.chassis.ids import RunId, StoreId, UserId

Owner: TypeAlias = tuple[StoreId, UserId]
ProjectStatus: TypeAlias = Literal["active", "on_hold", "completed", "archived"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A named list of tasks. No two of a user have the same title."""

    project_id: str
    title: str
    status: ProjectStatus = "active"
    notes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Something to do; with a parent it is a subtask."""

    task_id: str
    project_id: str
    parent_task_id: str | None
    title: str
    notes: str | None
    due: str | None
    """A date, YYYY-MM-DD."""
    is_done: bool = False
    run_id: RunId
    """The run that made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """The change that a call has made: the plan before and after. Removed tasks are only in `tasks_before`."""

    project_before: Project | None = None
    project_after: Project | None = None
    tasks_before: tuple[Task, ...] = ()
    tasks_after: tuple[Task, ...] = ()
