"""The needs of the planning tools: a repository of plans, and finding what the model means in it."""

from __future__ import annotations

from typing import Final

from pawl.chassis.ids import RunId
from pawl.tool_registry.builtin.planning.rules import Owner, Project, Task
from pawl.tool_registry.builtin.planning.store import PostgresPlanRepository
from pawl.tool_registry.rules.violations import did_you_mean, near_matches
from pawl.tool_registry.sdk.context import ToolError

PROJECTS_MAX: Final = 1000
_CANDIDATES_MAX: Final = 10


async def find_project(repository: PostgresPlanRepository, owner: Owner, reference: str) -> Project:
    """Return the project of that id or title.

    Raises:
        ToolError: there is none, or the text fits several: it says which.
    """
    wanted = reference.strip()
    folded = wanted.casefold()
    projects = await repository.projects(owner, PROJECTS_MAX)
    for project in projects:
        if wanted == project.project_id or folded == project.title.casefold():
            return project
    near = near_matches(wanted, [project.title for project in projects])
    alike = [project for project in projects if folded in project.title.casefold() or project.title in near]
    if not alike:
        raise ToolError(f"there is no project with the id or title {reference!r}")
    raise ToolError(
        f"no project has the title {reference!r}; alike are "
        + _listed([f"{project.title!r} ({project.project_id})" for project in alike])
        + _advice(len(alike))
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
    """Return the task of that id or title, in the project if one is given.

    Of several with the title those that are (not) done come first, if that is asked,
    and of these those that this run has made: other runs of the user make tasks at
    the same time.

    Raises:
        ToolError: there is none, or the title fits several: it lists them.
    """
    found = await repository.find_tasks(owner, reference.strip())
    found = [task for task in found if project_id in {None, task.project_id}]
    if not found:
        near = did_you_mean(reference, await repository.task_titles(owner))
        place = "" if project_id is None else " in that project"
        raise ToolError(f"there is no task with the id or title {reference!r}{place}{near}")
    if found[0].task_id == reference.strip():
        return found[0]
    wanted = [task for task in found if task.is_done is is_done] or found
    wanted = [task for task in wanted if task.run_id == run_id] or wanted
    if len(wanted) == 1:
        return wanted[0]
    homes = {project.project_id: project.title for project in await repository.projects(owner, PROJECTS_MAX)}
    shown = [
        f"{task.task_id} (in {homes.get(task.project_id, 'a project')!r}"
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
        return ". If that is meant, call again with its id"
    return ". Ask the user which one is meant, then call again with its id"
