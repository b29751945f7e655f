"""Tools that create and list projects, tasks and subtasks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Final

from pawl.chassis.ids import IdSource, RunId, StoreId, UserId
from pawl.tool_registry.builtin.planning.changes import (
    PROJECTS_MAX,
    Notes,
    Title,
    find_project,
    find_task,
    plan_change_tools,
    project_shown,
    task_shown,
    undo_creation,
)
from pawl.tool_registry.builtin.planning.comments import COMMENTS_LISTED_MAX, comment_tools, comments_on
from pawl.tool_registry.builtin.planning.rules import Comment, Owner, Project, Task
from pawl.tool_registry.builtin.planning.store import PostgresPlanRepository
from pawl.tools.rules.schema import near_matches
from pawl.tools.sdk.context import ToolContext
from pawl.tools.sdk.inverse import Reversible
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass

DEFAULT_PROJECT: Final = "Inbox"
LISTED_MAX: Final = 1000


def planning_tools(repository: PostgresPlanRepository, ids: IdSource) -> list[Tool[..., Any]]:
    return [
        _create_task(repository, ids),
        _add_subtask(repository, ids),
        _list_projects(repository),
        *plan_change_tools(repository),
        *comment_tools(repository, ids),
    ]


def _create_task(repository: PostgresPlanRepository, ids: IdSource) -> Tool[..., Any]:
    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def create_task(
        context: ToolContext,
        title: Title,
        project: Annotated[Title | None, "id or title of a project; a new title creates a project"] = None,
        notes: Notes | None = None,
        due: Annotated[date | None, "a date, YYYY-MM-DD"] = None,
    ) -> Any:
        """Create a task, in a project or in the Inbox."""
        owner = (StoreId(context.store_id), UserId(context.user_id))
        home, note = await _project_for(repository, ids, owner, project or DEFAULT_PROJECT)
        task = Task(
            task_id=ids.new("task"),
            project_id=home.project_id,
            parent_task_id=None,
            title=title.strip() or title,
            notes=notes,
            due=due.isoformat() if due else None,
            run_id=RunId(context.run_id),
        )
        task = await repository.add_task(owner, task, idempotency_key=context.idempotency_key)
        named = {"project_id": home.project_id, "title": home.title}
        value = {"task_id": task.task_id, "title": task.title, "project": named, "due": task.due} | note
        return Reversible(value=value, inverse=undo_creation(task))

    return create_task


def _add_subtask(repository: PostgresPlanRepository, ids: IdSource) -> Tool[..., Any]:
    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def add_subtask(
        context: ToolContext,
        parent: Annotated[Title, "id or title of a task"],
        title: Title,
        *,
        notes: Notes | None = None,
        due: Annotated[date | None, "a date, YYYY-MM-DD"] = None,
        project: Annotated[
            Title | None, "id or title of the parent's project, if the parent's title is ambiguous"
        ] = None,
    ) -> Any:
        """Add a subtask to a task."""
        owner = (StoreId(context.store_id), UserId(context.user_id))
        home = None if project is None else (await find_project(repository, owner, project)).project_id
        above = await find_task(repository, owner, parent, run_id=RunId(context.run_id), project_id=home)
        task = Task(
            task_id=ids.new("task"),
            project_id=above.project_id,
            parent_task_id=above.task_id,
            title=title.strip() or title,
            notes=notes,
            due=due.isoformat() if due else None,
            run_id=RunId(context.run_id),
        )
        task = await repository.add_task(owner, task, idempotency_key=context.idempotency_key)
        result: dict[str, Any] = {
            "task_id": task.task_id,
            "title": task.title,
            "parent": {"task_id": above.task_id, "title": above.title},
            "due": task.due,
        }
        return Reversible(value=result, inverse=undo_creation(task))

    return add_subtask


def _list_projects(repository: PostgresPlanRepository) -> Tool[..., Any]:
    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def list_projects(context: ToolContext) -> dict[str, Any]:
        """List the projects with their tasks and subtasks."""
        owner = (StoreId(context.store_id), UserId(context.user_id))
        projects = await repository.projects(owner, PROJECTS_MAX)
        tasks = await repository.tasks(owner, LISTED_MAX)
        comments = await repository.comments(owner, COMMENTS_LISTED_MAX)
        listed = {
            "projects": [
                project_shown(item)
                | comments_on(comments, item.project_id)
                | {"tasks": _tree(tasks, comments, item.project_id)}
                for item in projects
            ]
        }
        notes = [f"only the first {LISTED_MAX} tasks are listed"] if len(tasks) == LISTED_MAX else []
        if len(comments) == COMMENTS_LISTED_MAX:
            notes.append(f"only the newest {COMMENTS_LISTED_MAX} comments are listed")
        return listed | ({"note": "; ".join(notes)} if notes else {})

    return list_projects


async def _project_for(
    repository: PostgresPlanRepository, ids: IdSource, owner: Owner, reference: str
) -> tuple[Project, dict[str, Any]]:
    projects = await repository.projects(owner, PROJECTS_MAX)
    wanted = reference.strip()
    for project in projects:
        if wanted == project.project_id or wanted.casefold() == project.title.casefold():
            return project, {}
    made = await repository.add_project(owner, Project(project_id=ids.new("proj"), title=wanted or DEFAULT_PROJECT))
    near = near_matches(wanted, [project.title for project in projects])
    return made, {"project_created": True} | ({"similar_projects": near} if near else {})


def _tree(tasks: Sequence[Task], comments: Sequence[Comment], project_id: str) -> list[dict[str, Any]]:
    children: dict[str | None, list[Task]] = {}
    for task in tasks:
        if task.project_id == project_id:
            children.setdefault(task.parent_task_id, []).append(task)

    def shown(task: Task) -> dict[str, Any]:
        subtasks = [shown(child) for child in children.get(task.task_id, [])]
        more = comments_on(comments, task.task_id) | ({"subtasks": subtasks} if subtasks else {})
        return task_shown(task) | more

    return [shown(task) for task in children.get(None, [])]
