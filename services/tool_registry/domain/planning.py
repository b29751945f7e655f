"""Projects, tasks and subtasks: what the planning tools keep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A named list of tasks."""

    project_id: str
    title: str


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
