"""Tools that change projects and tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import date
from typing import Annotated, Any, Final

import msgspec

from pawl.chassis.ids import RunId, StoreId, UserId
from pawl.tool_registry.builtin.planning.rules import Owner, PlanChange, Project, ProjectStatus, Task
from pawl.tool_registry.builtin.planning.store import PostgresPlanRepository
from pawl.tools.rules.schema import did_you_mean, near_matches
from pawl.tools.sdk.context import ToolContext, ToolError
from pawl.tools.sdk.inverse import Inverse, Reversible
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass

PROJECTS_MAX: Final = 1000
_CANDIDATES_MAX: Final = 10


async def find_project(repository: PostgresPlanRepository, owner: Owner, reference: str) -> Project:
    """Return the project with the given id or title.

    Raises:
        ToolError: No project matches. The message lists similar titles.
    """
    wanted = reference.strip()
    folded = wanted.casefold()
    projects = await repository.projects(owner, PROJECTS_MAX)
    for project in projects:
        if wanted == project.project_id or folded == project.title.casefold():
            return project
    near = near_matches(wanted, [project.title for project in projects])
    similar = [project for project in projects if folded in project.title.casefold() or project.title in near]
    if not similar:
        raise ToolError(f"no project has the id or title {reference!r}")
    raise ToolError(
        f"no project has the title {reference!r}; similar titles: "
        + _listed([f"{project.title!r} ({project.project_id})" for project in similar])
        + _advice(len(similar))
    )


async def find_task(
    repository: PostgresPlanRepository,
    owner: Owner,
    reference: str,
    *,
    run_id: RunId,
    is_done: bool | None = None,
    project_id: str | None = None,
) -> Task:
    """Return the task with the given id or title. If a project is given, search only that project.

    If several tasks have the title, prefer those with the given `is_done` and, among these, the ones that this run
    created. Other runs of the user may create tasks at the same time.

    Raises:
        ToolError: No task matches, or several tasks do. The message lists them.
    """
    found = await repository.find_tasks(owner, reference.strip())
    found = [task for task in found if project_id in {None, task.project_id}]
    if not found:
        near = did_you_mean(reference, await repository.task_titles(owner))
        place = "" if project_id is None else " in that project"
        raise ToolError(f"no task has the id or title {reference!r}{place}{near}")
    if found[0].task_id == reference.strip():
        return found[0]
    wanted = [task for task in found if task.is_done is is_done] or found
    wanted = [task for task in wanted if task.run_id == run_id] or wanted
    if len(wanted) == 1:
        return wanted[0]
    titles = {project.project_id: project.title for project in await repository.projects(owner, PROJECTS_MAX)}
    shown = [
        f"{task.task_id} (in {titles.get(task.project_id, 'a project')!r}"
        + (f", due {task.due}" if task.due else "")
        + (", done" if task.is_done else "")
        + ")"
        for task in wanted
    ]
    raise ToolError(f"{len(wanted)} tasks have the title {reference!r}: {_listed(shown)}{_advice(len(wanted))}")


def _listed(shown: list[str]) -> str:
    more = len(shown) - _CANDIDATES_MAX
    return ", ".join(shown[:_CANDIDATES_MAX]) + (f" and {more} more" if more > 0 else "")


def _advice(count: int) -> str:
    if count == 1:
        return ". If you meant this one, call again with its id"
    return ". Ask the user which one they mean, then call again with its id"


TASKS_MAX: Final = 100

Title = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
Notes = Annotated[str, msgspec.Meta(max_length=10000)]
Due = Annotated[str, msgspec.Meta(pattern="^([0-9]{4}-[0-9]{2}-[0-9]{2}|none)$")]
TaskReferences = Annotated[
    list[Title], msgspec.Meta(min_length=1, max_length=TASKS_MAX), "ids or titles; all of them in one call"
]


def plan_change_tools(repository: PostgresPlanRepository) -> list[Tool[..., Any]]:
    return [_update_project(repository), _update_task(repository), *_completing(repository), _delete_task(repository)]


def _update_project(repository: PostgresPlanRepository) -> Tool[..., Any]:
    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def update_project(
        context: ToolContext,
        project: Annotated[Title, "id or title"],
        title: Title | None = None,
        status: ProjectStatus | None = None,
        notes: Annotated[Notes | None, "an empty text removes them"] = None,
    ) -> Any:
        """Change the title, status or notes of a project; omitted fields stay unchanged."""
        fields = _given(title=title and (title.strip() or title), status=status, notes=notes)

        async def make(owner: Owner, key: str) -> PlanChange:
            found = await find_project(repository, owner, project)
            return await repository.change_project(owner, found.project_id, fields, idempotency_key=key)

        change = await once(repository, context, make)
        before, after = change.project_before, change.project_after
        if before is None or after is None:
            raise ToolError(f"the project {project!r} no longer exists")
        return _reversible(project_shown(after), _undo_project(before, after))

    return update_project


def _update_task(repository: PostgresPlanRepository) -> Tool[..., Any]:
    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def update_task(
        context: ToolContext,
        task: Annotated[Title, "id or title"],
        *,
        title: Title | None = None,
        notes: Annotated[Notes | None, "an empty text removes them"] = None,
        due: Annotated[Due | None, "a date, YYYY-MM-DD; none removes it"] = None,
        done: bool | None = None,
    ) -> Any:
        """Change a task or subtask; omitted fields stay unchanged."""
        fields = _given(title=title and (title.strip() or title), notes=notes, is_done=done)
        if due is not None:
            fields["due"] = None if due == "none" else _date(due)

        async def make(owner: Owner, key: str) -> PlanChange:
            found = await find_task(repository, owner, task, run_id=RunId(context.run_id))
            return await repository.change_tasks(owner, [found.task_id], fields, idempotency_key=key)

        change = await once(repository, context, make)
        if not change.tasks_after:
            raise ToolError(f"the task {task!r} no longer exists")
        (before,), (after,) = change.tasks_before, change.tasks_after
        return _reversible(task_shown(after), _undo_task(before, after))

    return update_task


def _completing(repository: PostgresPlanRepository) -> list[Tool[..., Any]]:
    async def tick(context: ToolContext, tasks: list[str], *, is_done: bool) -> Any:
        async def make(owner: Owner, key: str) -> PlanChange:
            found = await _all_tasks(repository, owner, tasks, run_id=RunId(context.run_id), is_done=not is_done)
            return await repository.change_tasks(owner, list(found), {"is_done": is_done}, idempotency_key=key)

        change = await once(repository, context, make)
        ticked = [task for task in change.tasks_before if task.is_done is not is_done]
        same = [task for task in change.tasks_before if task.is_done is is_done]
        value = {"completed" if is_done else "reopened": [_named(task) for task in ticked]}
        if same:
            value["were_done_already" if is_done else "were_open_already"] = [_named(task) for task in same]
        return _reversible(value, _undo_completing(ticked, is_done=is_done))

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def complete_tasks(context: ToolContext, tasks: TaskReferences) -> Any:
        """Mark tasks as done; changes nothing if one of them is not found."""
        return await tick(context, tasks, is_done=True)

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def reopen_tasks(context: ToolContext, tasks: TaskReferences) -> Any:
        """Mark tasks as not done; changes nothing if one of them is not found."""
        return await tick(context, tasks, is_done=False)

    return [complete_tasks, reopen_tasks]


def _delete_task(repository: PostgresPlanRepository) -> Tool[..., Any]:
    @tool(
        category=Category.DESTRUCTIVE,
        effect=EffectClass.IDEMPOTENT,
        preview=lambda task, with_subtasks, **_: (
            f"Delete the task {task!r}" + (" with all its subtasks" if with_subtasks else "")
        ),
    )
    async def delete_task(
        context: ToolContext,
        task: Annotated[Title, "id or title"],
        *,
        with_subtasks: Annotated[bool, "true to also delete its subtasks"] = False,
    ) -> dict[str, Any]:
        """Delete a task or subtask permanently. To mark it as done, use complete_tasks."""

        async def make(owner: Owner, key: str) -> PlanChange:
            found = await find_task(repository, owner, task, run_id=RunId(context.run_id))
            return await repository.remove_task(owner, found.task_id, with_subtasks=with_subtasks, idempotency_key=key)

        change = await once(repository, context, make)
        if not change.tasks_before:
            raise ToolError(f"nothing was deleted: {task!r} has subtasks; set with_subtasks to delete them too")
        return {"deleted": [_named(each) for each in change.tasks_before]}

    return delete_task


def project_shown(project: Project) -> dict[str, Any]:
    shown: dict[str, Any] = {"project_id": project.project_id, "title": project.title}
    if project.status != "active":
        shown["status"] = project.status
    return shown | ({"notes": project.notes} if project.notes else {})


def task_shown(task: Task) -> dict[str, Any]:
    fields = {**_named(task), "notes": task.notes, "due": task.due, "done": task.is_done or None}
    return {name: value for name, value in fields.items() if value is not None}


def undo_creation(task: Task) -> Inverse:
    return Inverse(tool_name="delete_task", arguments={"task": task.task_id}, summary=f"Delete the task {task.title!r}")


async def once(
    repository: PostgresPlanRepository, context: ToolContext, make: Callable[[Owner, str], Awaitable[PlanChange]]
) -> PlanChange:
    """Return the change that the call has already made. If there is none, make the change."""
    owner, key = (StoreId(context.store_id), UserId(context.user_id)), context.idempotency_key
    earlier = await repository.earlier_change(owner, idempotency_key=key)
    return await make(owner, key) if earlier is None else earlier


async def _all_tasks(
    repository: PostgresPlanRepository, owner: Owner, references: Sequence[str], *, run_id: RunId, is_done: bool
) -> dict[str, Task]:
    """Return the referenced tasks by id.

    Raises:
        ToolError: A reference does not match exactly one task. The error lists all problems.
    """
    found: dict[str, Task] = {}
    problems = []
    for reference in references:
        try:
            task = await find_task(repository, owner, reference, run_id=run_id, is_done=is_done)
        except ToolError as error:
            problems.append(str(error))
        else:
            found[task.task_id] = task
    if problems:
        raise ToolError("nothing was changed: " + "; ".join(problems))
    return found


def _given(**fields: Any) -> dict[str, Any]:
    return {name: (None if value == "" else value) for name, value in fields.items() if value is not None}


def _date(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise ToolError(f"{text!r} is not a date: use YYYY-MM-DD") from None


def _reversible(value: dict[str, Any], inverse: Inverse | None) -> Any:
    return value if inverse is None else Reversible(value=value, inverse=inverse)


def _undo_project(before: Project, after: Project) -> Inverse | None:
    if before == after:
        return None
    arguments = {"project": before.project_id, "title": before.title, "status": before.status}
    return Inverse(
        tool_name="update_project",
        arguments=arguments | {"notes": before.notes or ""},
        summary=f"Restore title, status and notes of the project {after.title!r}",
    )


def _undo_task(before: Task, after: Task) -> Inverse | None:
    if before == after:
        return None
    arguments = {"task": before.task_id, "title": before.title, "notes": before.notes or ""}
    return Inverse(
        tool_name="update_task",
        arguments=arguments | {"due": before.due or "none", "done": before.is_done},
        summary=f"Restore the task {after.title!r}",
    )


def _undo_completing(ticked: Sequence[Task], *, is_done: bool) -> Inverse | None:
    if not ticked:
        return None
    name, verb = ("reopen_tasks", "Reopen") if is_done else ("complete_tasks", "Complete")
    titles = ", ".join(repr(task.title) for task in ticked)
    return Inverse(tool_name=name, arguments={"tasks": [task.task_id for task in ticked]}, summary=f"{verb} {titles}")


def _named(task: Task) -> dict[str, Any]:
    return {"task_id": task.task_id, "title": task.title}
