"""Implements `pawl approve`, which decides on one call and can make a rule from the approval."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.cli import access, answers, wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, Yes, command, confirm, say
from pawl.cli.contract import ask, choices, number_of
from pawl.cli.failure import CommandError, explain
from pawl.cli.transcript import Transcript
from pawl.client import AsyncClient, decisions
from pawl.errors import NotFound, PermissionDenied, RunNotFound
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import rule_pb2

_SCOPE: Final = rule_pb2.RuleScope.DESCRIPTOR
Remember: Any = Annotated[
    choices(_SCOPE) | None,
    typer.Option(help="Approve, and allow the tool without approval in this scope.", show_default=False),
]


@command()
async def approve(
    target: AsyncClient,
    console: Console,
    run_id: Annotated[str, typer.Argument(help="Id of the run.", show_default=False)],
    call_id: Annotated[str, typer.Argument(help="Id of the call.", show_default=False)],
    *,
    edit: Annotated[str | None, typer.Option(help="Run it with these arguments, a JSON object.")] = None,
    reject: Annotated[str | None, typer.Option(help="Do not run it; the model receives this reason.")] = None,
    answer: Annotated[
        str | None,
        typer.Option(help="Answer a question (text or option number), or give the result of the call."),
    ] = None,
    series: Annotated[
        bool, typer.Option("--series", help="Approve the whole series of a job, not only this call.")
    ] = False,
    interval: Annotated[float | None, typer.Option(help="With --series: seconds between calls.")] = None,
    stop_after: Annotated[int | None, typer.Option(min=1, help="With --series: maximum number of calls.")] = None,
    duration: Annotated[float | None, typer.Option(help="With --series: minutes until it ends.")] = None,
    remember: Remember = None,
    lasts: Annotated[
        str | None, typer.Option("--for", help="With --remember: how long the rule lasts: 30m, 2h or 7d.")
    ] = None,
    uses: Annotated[int | None, typer.Option(min=1, help="With --remember: maximum number of calls.")] = None,
    yes: Yes = False,
) -> int:
    """Decide on a pending call.

    Shows the call, then approves it, edits its arguments, rejects it or answers it. With --remember it also creates a
    rule (see `pawl rules`); either both take effect or neither does.
    """
    terms = (interval, stop_after, duration)
    _check_options((edit, reject, answer), remember=remember, limits=(lasts, uses), series=series, terms=terms)
    call = await find_pending(target, run_id, call_id)
    if call.state not in answers.DECIDABLE:
        raise CommandError(f"The outcome of {call_id} is unknown. Report it with `pawl resolve`.")
    Transcript(console).pending(call)
    decision = for_series(call, edit, *terms) if series else _decision(call, edit, reject, answer)
    if decision.for_series and decision.HasField("edited_series"):
        say(console, f"approving: {wording.series_text(decision.edited_series)}")
    if decision.kind == call_pb2.DECISION_KIND_APPROVE and not confirm(
        "Approve this series?" if series else "Run this call?", yes=yes
    ):
        return EXIT_UNSUCCESSFUL
    if remember is None:
        await target.decide(decision)
        say(console, answers.done(decision, call), "green")
        return 0
    async with remembered(target, call, remember, lasts=lasts, uses=uses or 0) as rule:
        await target.decide(decision)
    say(console, f"{answers.done(decision, call)} {rule_notice(rule)}", "green")
    return 0


def _check_options(
    others: tuple[str | None, str | None, str | None],
    *,
    remember: object,
    limits: tuple[object, object],
    series: bool,
    terms: tuple[object, object, object],
) -> None:
    _, *replies = others
    if [*others, remember].count(None) < len(others):
        raise CommandError("--edit, --reject, --answer and --remember are mutually exclusive.")
    if remember is None and limits != (None, None):
        raise CommandError("--for and --uses require --remember.")
    if series and [*replies, remember] != [None, None, None]:
        raise CommandError("--series cannot be combined with --reject, --answer or --remember.")
    if not series and terms != (None, None, None):
        raise CommandError("--interval, --stop-after and --duration require --series.")


def for_series(
    call: call_pb2.Call, edit: str | None, interval: float | None, stop_after: int | None, duration: float | None
) -> types_pb2.CallDecision:
    if interval is stop_after is duration is None:
        return (
            decisions.approve(call, for_series=True)
            if edit is None
            else answers.edit(call, edit.encode(), for_series=True)
        )
    edited = call_pb2.Series()
    edited.CopyFrom(call.approval.series)
    edited.interval_seconds = edited.interval_seconds if interval is None else interval
    try:
        edited.iterations_max = stop_after or edited.iterations_max
        if duration is not None:
            edited.end_time.FromDatetime(datetime.now(UTC) + timedelta(minutes=duration))
    except (ValueError, OverflowError):
        raise CommandError("--stop-after or --duration is out of range.") from None
    arguments = call.arguments_json if edit is None else edit.encode()
    return answers.edit(call, arguments, for_series=True, series=edited)


async def find_pending(target: AsyncClient, run_id: str, call_id: str) -> call_pb2.Call:
    """Return a pending call. In another user's run, approvers find only calls that are waiting for approval.

    In the caller's own run, also find calls that ask another user by name. The server then reports who can decide.

    Raises:
        CommandError: The call is not pending.
    """
    for scope in (agent_pb2.PENDING_SCOPE_MINE, agent_pb2.PENDING_SCOPE_STORE):
        with suppress(PermissionDenied):
            async for item in target.pending(agent_pb2.PendingFilter(scope=scope)):
                if isinstance(item, call_pb2.Call) and (item.run_id, item.call_id) == (run_id, call_id):
                    return item
    with suppress(NotFound):
        for call in (await target.get(run_id)).pending_calls:
            if (call.run_id, call.call_id) == (run_id, call_id):
                return call
    raise CommandError(f"Call {call_id} of {run_id} is not pending. `pawl inbox` lists pending calls.")


def _decision(call: call_pb2.Call, edit: str | None, reject: str | None, answer: str | None) -> types_pb2.CallDecision:
    if edit is not None:
        return answers.edit(call, edit.encode())
    if reject is not None:
        return decisions.reject(call, reject)
    if answer is not None:
        return decisions.answer(call, answers.chosen(answer.strip(), call))
    if call.state == call_pb2.CALL_STATE_ASKED:
        raise CommandError('This is a question. Answer it with --answer "...".')
    return decisions.approve(call)


@asynccontextmanager
async def remembered(
    target: AsyncClient, call: call_pb2.Call, reach: Any, *, lasts: str | None = None, uses: int = 0
) -> AsyncIterator[rule_pb2.Rule]:
    """Create a rule that allows a call's tool, and let the body approve the call. If that fails, revoke the rule.

    The rule ends after a duration such as 2h, after `uses` calls (0 means no limit), or when it is revoked.

    Raises:
        CommandError: No rule can replace this approval, or the approval failed and the rule could not be revoked.
    """
    await _check_rememberable(target, call)
    ids = {"run": call.run_id, "conversation": call.conversation_id, "agent": call.agent_name or "default"}
    scope: Any = number_of(_SCOPE, reach)
    rule = rule_pb2.Rule(
        effect=rule_pb2.RULE_EFFECT_ALLOW,
        scope=scope,
        scope_id=ids.get(reach, ""),
        tool_name=call.tool_name,
        uses_max=uses,
        call_id=call.call_id,
    )
    if lasts is not None:
        access.set_end(rule, lasts)
    made = (await ask(target, rule_pb2.CreateRuleRequest(rule=rule))).rule
    try:
        yield made
    except BaseException as error:
        try:
            await ask(target, rule_pb2.RevokeRuleRequest(rule_id=made.rule_id))
        except Exception as failure:  # noqa: BLE001  # both errors are reported
            first = explain(error, list(target.agent)) if isinstance(error, Exception) else "It was interrupted."
            raise CommandError(
                f"{first} The rule {made.rule_id} created for it is still active:"
                f" {explain(failure, list(target.tools), 'tools')} Revoke it with `pawl rules revoke {made.rule_id}`."
            ) from None
        raise


def rule_notice(rule: rule_pb2.Rule) -> str:
    return f"New rule: {access.rule_text(rule)}. Revoke it with: pawl rules revoke {rule.rule_id}"


async def _check_rememberable(target: AsyncClient, call: call_pb2.Call) -> None:
    if call.state != call_pb2.CALL_STATE_AWAITING_APPROVAL:
        raise CommandError("Only approvals can be remembered, and this call is not waiting for approval.")
    if call.approval.approvals_required > 1:
        raise CommandError("This call needs two approvers each time. A rule cannot replace them.")
    try:
        await target.get(call.run_id)
    except RunNotFound:
        raise CommandError("Rules apply to your own runs, and this run belongs to another user.") from None
