"""Projects, tasks and subtasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from pawl.chassis.ids import RunId, StoreId, UserId

Owner: TypeAlias = tuple[StoreId, UserId]
ProjectStatus: TypeAlias = Literal["active", "on_hold", "completed", "archived"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A named list of tasks. Titles are unique per user."""

    project_id: str
    title: str
    status: ProjectStatus = "active"
    notes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task, or a subtask if it has a parent."""

    task_id: str
    project_id: str
    parent_task_id: str | None
    title: str
    notes: str | None
    # A date, YYYY-MM-DD.
    due: str | None
    is_done: bool = False
    # The run that created it.
    run_id: RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class Comment:
    """A comment on either a task or a project."""

    comment_id: str
    task_id: str | None = None
    project_id: str | None = None
    content: str
    # The time in UTC, in ISO 8601; empty until the comment is stored.
    created: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """A change made by a call, with the values before and after it.

    Removed tasks and comments are only in `..._before`.
    """

    project_before: Project | None = None
    project_after: Project | None = None
    tasks_before: tuple[Task, ...] = ()
    tasks_after: tuple[Task, ...] = ()
    comment_before: Comment | None = None
