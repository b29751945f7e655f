"""Tools that add and delete comments on projects and tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from pawl.chassis.ids import IdSource, RunId, StoreId, UserId
from pawl.tool_registry.builtin.planning.changes import Title, find_project, find_task, once
from pawl.tool_registry.builtin.planning.rules import Comment, Owner, PlanChange
from pawl.tool_registry.builtin.planning.store import PostgresPlanRepository
from pawl.tools.sdk.context import ToolContext, ToolError
from pawl.tools.sdk.inverse import Inverse, Reversible
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass

# Comments that `list_projects` shows.
COMMENTS_LISTED_MAX: Final = 200
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]


def comment_tools(repository: PostgresPlanRepository, ids: IdSource) -> list[Tool[..., Any]]:
    return [_add_comment(repository, ids), _delete_comment(repository)]


def _add_comment(repository: PostgresPlanRepository, ids: IdSource) -> Tool[..., Any]:
    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def add_comment(
        context: ToolContext,
        text: Text,
        task: Annotated[Title | None, "id or title of the task"] = None,
        project: Annotated[Title | None, "id or title of the project, or of the task's project"] = None,
    ) -> Any:
        """Add a comment to a task or a project. list_projects shows it."""
        owner, run_id = (StoreId(context.store_id), UserId(context.user_id)), RunId(context.run_id)
        if not text.strip():
            raise ToolError("the comment is empty")
        home = await find_project(repository, owner, project) if project else None
        on: dict[str, str]
        if task:
            within = home.project_id if home else None
            found = await find_task(repository, owner, task, run_id=run_id, project_id=within)
            on, title = {"task_id": found.task_id}, found.title
        elif home:
            on, title = {"project_id": home.project_id}, home.title
        else:
            raise ToolError("name the task or the project to comment on")
        comment = Comment(comment_id=ids.new("comment"), content=text, **on)
        comment = await repository.add_comment(owner, comment, idempotency_key=context.idempotency_key)
        undo = Inverse(
            tool_name="delete_comment",
            arguments={"comment_id": comment.comment_id, "text": text},
            summary=f"Delete the comment on {title!r}",
        )
        return Reversible(value={"comment_id": comment.comment_id, **on, "title": title}, inverse=undo)

    return add_comment


def _delete_comment(repository: PostgresPlanRepository) -> Tool[..., Any]:
    @tool(
        category=Category.DESTRUCTIVE,
        effect=EffectClass.IDEMPOTENT,
        preview=lambda text, **_: f"Delete the comment:\n{text}",
    )
    async def delete_comment(
        context: ToolContext,
        comment_id: Annotated[str, msgspec.Meta(max_length=64), "the comment's id, from list_projects"],
        text: Annotated[Text, "its text, unchanged"],
    ) -> dict[str, Any]:
        """Delete a comment permanently."""

        async def make(owner: Owner, key: str) -> PlanChange:
            return await repository.remove_comment(owner, comment_id, text, idempotency_key=key)

        removed = (await once(repository, context, make)).comment_before
        if removed is None:
            raise ToolError(f"there is no comment {comment_id!r} with this text; list_projects shows the comments")
        return {"deleted": removed.comment_id, "text": removed.content}

    return delete_comment


def comments_on(comments: Sequence[Comment], subject_id: str) -> dict[str, Any]:
    """Return a field with the comments on a task or project, or no field if there are none."""
    shown = [
        {"comment_id": each.comment_id, "text": each.content, "time": each.created}
        for each in comments
        if subject_id in {each.task_id, each.project_id}
    ]
    return {"comments": shown} if shown else {}
