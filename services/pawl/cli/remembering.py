"""Approving for the next time too: the rule that goes with an approval."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum

from pawl.cli import rules
from pawl.cli.failure import CommandError, explain
from pawl.client import AsyncClient
from pawl.errors import RunNotFound
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import rule_pb2


class Reach(StrEnum):
    """The reach of a rule."""

    RUN = "run"
    CONVERSATION = "conversation"
    USER = "user"


@asynccontextmanager
async def remembered(
    target: AsyncClient, call: call_pb2.Call, reach: Reach, *, lasts: str | None = None, uses: int = 0
) -> AsyncIterator[rule_pb2.Rule]:
    """Make the rule, then let the body approve the call; if the body fails, the rule is revoked again.

    It lets calls of the same tool run without an approval: with any arguments, for a time like 30m or 2h, else until
    it is revoked, and as many as `uses`, 0 for any number. So if the rule cannot be made nothing has happened, and if
    the approval is not taken nothing is left behind.

    Raises:
        CommandError: no rule can stand for this approval; or the approval failed and
            the rule could not be revoked, which then is said with both reasons.
    """
    await _check(target, call)
    rule = rule_pb2.Rule(
        effect=rule_pb2.RULE_EFFECT_ALLOW,
        scope=rule_pb2.RuleScope.Value(f"RULE_SCOPE_{reach.name}"),
        tool_name=call.tool_name,
        uses_max=uses,
        call_id=call.call_id,
    )
    if reach is not Reach.USER:
        rule.scope_id = call.run_id if reach is Reach.RUN else call.conversation_id
    if lasts is not None:
        rules.set_end(rule, lasts)
    made = await rules.create(target, rule)
    try:
        yield made
    except BaseException as error:
        try:
            await rules.end(target, made.rule_id)
        except Exception as failure:  # noqa: BLE001  # whatever it is, both have to be told
            first = explain(error, list(target.agent)) if isinstance(error, Exception) else "It was interrupted."
            raise CommandError(
                f"{first} And the rule {made.rule_id}, which was made for it, is still in force:"
                f" {explain(failure, list(target.tools), 'tools')} End it with `pawl rules revoke {made.rule_id}`."
            ) from None
        raise


def told(rule: rule_pb2.Rule) -> str:
    """Return what to say about a rule that goes with an approval."""
    return f"From now on: {rules.says(rule)}. End it with: pawl rules revoke {rule.rule_id}"


async def _check(target: AsyncClient, call: call_pb2.Call) -> None:
    if call.state != call_pb2.CALL_STATE_AWAITING_APPROVAL:
        raise CommandError("Only an approval can be remembered, and this call does not wait for one.")
    if call.approval.approvals_required > 1:
        raise CommandError("This call needs two people each time: no rule can stand for them.")
    try:
        await target.get(call.run_id)
    except RunNotFound:
        raise CommandError("Rules count for your own runs, and this run is somebody else's.") from None
