"""Projects, tasks and subtasks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Final, Protocol

import msgspec

from services.chassis.ids import IdSource
from services.tool_registry.domain.names import did_you_mean, near_matches
from services.tool_registry.domain.planning import Project, Task
from services.tool_registry.sdk import Category, Effect, Tool, ToolContext, ToolError, tool

DEFAULT_PROJECT: Final = "Inbox"
LISTED_MAX: Final = 1000

Title = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
Notes = Annotated[str, msgspec.Meta(max_length=10000)]


class PlanBook(Protocol):
    """Where plans are kept, by store and user."""

    async def add_project(self, store_id: str, user_id: str, project: Project) -> Project:
        """Add a project, or return the one that has its title (in any case)."""
        ...

    async def add_task(self, store_id: str, user_id: str, task: Task, *, idempotency_key: str) -> Task:
        """Add a task, or return the one that was added with that key."""
        ...

    async def projects(self, store_id: str, user_id: str, most: int) -> Sequence[Project]:
        """Return the user's projects, oldest first."""
        ...

    async def tasks(self, store_id: str, user_id: str, most: int) -> Sequence[Task]:
        """Return the user's tasks and subtasks, oldest first."""
        ...

    async def find_tasks(self, store_id: str, user_id: str, reference: str) -> Sequence[Task]:
        """Return the task of that id, then those of that title (in any case), newest first."""
        ...

    async def task_titles(self, store_id: str, user_id: str) -> Sequence[str]:
        """Return titles of the user's tasks, newest first."""
        ...


def planning_tools(book: PlanBook, ids: IdSource) -> list[Tool[..., Any]]:
    """Return create_task, add_subtask and list_projects."""
    return [_create_task(book, ids), _add_subtask(book, ids), _list_projects(book)]


def _create_task(book: PlanBook, ids: IdSource) -> Tool[..., Any]:
    @tool(category=Category.SAFE, effect=Effect.IDEMPOTENT)
    async def create_task(
        context: ToolContext,
        title: Title,
        project: Annotated[Title | None, "id or title of a project; a new title makes a new project"] = None,
        notes: Notes | None = None,
        due: Annotated[date | None, "a date, YYYY-MM-DD"] = None,
    ) -> dict[str, Any]:
        """Create a task, in a project or in the Inbox."""
        owner = (context.store_id, context.user_id)
        home, remark = await _home(book, ids, owner, project or DEFAULT_PROJECT)
        task = Task(
            task_id=ids.new("task"),
            project_id=home.project_id,
            parent_task_id=None,
            title=title.strip() or title,
            notes=notes,
            due=due.isoformat() if due else None,
        )
        task = await book.add_task(*owner, task, idempotency_key=context.idempotency_key)
        return {"task_id": task.task_id, "title": task.title, "project": _project(home), "due": task.due} | remark

    return create_task


def _add_subtask(book: PlanBook, ids: IdSource) -> Tool[..., Any]:
    @tool(category=Category.SAFE, effect=Effect.IDEMPOTENT)
    async def add_subtask(
        context: ToolContext,
        parent: Annotated[Title, "id or title of a task, also one created just before"],
        title: Title,
        notes: Notes | None = None,
        due: Annotated[date | None, "a date, YYYY-MM-DD"] = None,
    ) -> dict[str, Any]:
        """Add a subtask to a task."""
        owner = (context.store_id, context.user_id)
        found = await book.find_tasks(*owner, parent.strip())
        if not found:
            near = did_you_mean(parent, await book.task_titles(*owner))
            raise ToolError(f"there is no task with the id or title {parent!r}{near}")
        above = found[0]
        task = Task(
            task_id=ids.new("task"),
            project_id=above.project_id,
            parent_task_id=above.task_id,
            title=title.strip() or title,
            notes=notes,
            due=due.isoformat() if due else None,
        )
        task = await book.add_task(*owner, task, idempotency_key=context.idempotency_key)
        result: dict[str, Any] = {
            "task_id": task.task_id,
            "title": task.title,
            "parent": {"task_id": above.task_id, "title": above.title},
            "due": task.due,
        }
        if len(found) > 1 and above.task_id != parent.strip():
            result["note"] = f"{len(found)} tasks have the title {above.title!r}; the newest was taken"
        return result

    return add_subtask


def _list_projects(book: PlanBook) -> Tool[..., Any]:
    @tool(category=Category.SAFE, effect=Effect.READ_ONLY)
    async def list_projects(context: ToolContext) -> dict[str, Any]:
        """List the projects with their tasks and subtasks."""
        owner = (context.store_id, context.user_id)
        projects = await book.projects(*owner, LISTED_MAX)
        tasks = await book.tasks(*owner, LISTED_MAX)
        listed = {"projects": [_project(item) | {"tasks": _tree(tasks, item.project_id)} for item in projects]}
        if len(tasks) == LISTED_MAX:
            return listed | {"note": f"only the first {LISTED_MAX} tasks are listed"}
        return listed

    return list_projects


async def _home(
    book: PlanBook, ids: IdSource, owner: tuple[str, str], reference: str
) -> tuple[Project, dict[str, Any]]:
    """Return the project of that id or title, made if need be, and what to say of that."""
    projects = await book.projects(*owner, LISTED_MAX)
    wanted = reference.strip()
    for project in projects:
        if wanted == project.project_id or wanted.casefold() == project.title.casefold():
            return project, {}
    made = await book.add_project(*owner, Project(project_id=ids.new("proj"), title=wanted or DEFAULT_PROJECT))
    near = near_matches(wanted, [project.title for project in projects])
    return made, {"project_created": True} | ({"similar_projects": near} if near else {})


def _project(project: Project) -> dict[str, Any]:
    return {"project_id": project.project_id, "title": project.title}


def _tree(tasks: Sequence[Task], project_id: str) -> list[dict[str, Any]]:
    children: dict[str | None, list[Task]] = {}
    for task in tasks:
        if task.project_id == project_id:
            children.setdefault(task.parent_task_id, []).append(task)

    def shown(task: Task) -> dict[str, Any]:
        fields = {"task_id": task.task_id, "title": task.title, "notes": task.notes, "due": task.due}
        subtasks = [shown(child) for child in children.get(task.task_id, [])]
        return {name: value for name, value in fields.items() if value is not None} | (
            {"subtasks": subtasks} if subtasks else {}
        )

    return [shown(task) for task in children.get(None, [])]
