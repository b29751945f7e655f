"""`pawl approve`: one call that waits for somebody, and the rule that an approval can make for the next time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.cli import access, answers, wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, Yes, command, is_sure, say
from pawl.cli.contract import ask, choices, number_of
from pawl.cli.failure import CommandError, explain
from pawl.cli.transcript import Transcript
from pawl.client import AsyncClient, decisions
from pawl.errors import PermissionDenied, RunNotFound
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import rule_pb2

_SCOPE: Final = rule_pb2.RuleScope.DESCRIPTOR
Remember: Any = Annotated[
    choices(_SCOPE) | None,
    typer.Option(help="Approve, and let the same tool run without an approval there.", show_default=False),
]


@command()
async def approve(
    target: AsyncClient,
    console: Console,
    run_id: Annotated[str, typer.Argument(help="Id of the run.", show_default=False)],
    call_id: Annotated[str, typer.Argument(help="Id of the call.", show_default=False)],
    *,
    edit: Annotated[str | None, typer.Option(help="Run it with these arguments: a JSON object.")] = None,
    reject: Annotated[str | None, typer.Option(help="Do not run it; the model gets this reason.")] = None,
    answer: Annotated[
        str | None,
        typer.Option(help="Answer a question (or the number of an option), or give the result."),
    ] = None,
    series: Annotated[
        bool, typer.Option("--series", help="Approve the whole series of a job, as shown, and not this call alone.")
    ] = False,
    interval: Annotated[float | None, typer.Option(help="With --series: seconds from one call to the next.")] = None,
    stop_after: Annotated[int | None, typer.Option(min=1, help="With --series: most calls in all.")] = None,
    duration: Annotated[float | None, typer.Option(help="With --series: minutes from now on.")] = None,
    remember: Remember = None,
    lasts: Annotated[str | None, typer.Option("--for", help="How long to remember it: 30m, 2h, 7d.")] = None,
    uses: Annotated[int | None, typer.Option(min=1, help="For how many calls to remember it.")] = None,
    yes: Yes = False,
) -> int:
    """Decide about a call that waits.

    Shows it, then approves it, or runs it with other arguments, or rejects it, or
    answers it. With --remember it makes a rule too (`pawl rules`), and does both or
    neither.
    """
    terms = (interval, stop_after, duration)
    _check_options((edit, reject, answer), remember=remember, limits=(lasts, uses), series=series, terms=terms)
    call = await find_pending(target, run_id, call_id)
    if call.state not in answers.DECIDABLE:
        raise CommandError(f"The outcome of {call_id} is unknown. Report it with `pawl resolve`.")
    Transcript(console).pending(call)
    decision = for_series(call, edit, *terms) if series else _decision(call, edit, reject, answer)
    if decision.for_series and decision.HasField("edited_series"):
        say(console, f"granted: {wording.series_text(decision.edited_series)}")
    if decision.kind == call_pb2.DECISION_KIND_APPROVE and not is_sure(
        "Grant the series like this?" if series else "Run it like this?", yes=yes
    ):
        return EXIT_UNSUCCESSFUL
    if remember is None:
        await target.decide(decision)
        say(console, answers.done(decision, call), "green")
        return 0
    async with remembered(target, call, remember, lasts=lasts, uses=uses or 0) as rule:
        await target.decide(decision)
    say(console, f"{answers.done(decision, call)} {told(rule)}", "green")
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
        raise CommandError("Give only one of --edit, --reject, --answer and --remember.")
    if remember is None and limits != (None, None):
        raise CommandError("--for and --uses go with --remember.")
    if series and [*replies, remember] != [None, None, None]:
        raise CommandError("--series goes with an approval or --edit, not with --reject, --answer or --remember.")
    if not series and terms != (None, None, None):
        raise CommandError("--interval, --stop-after and --duration go with --series.")


def for_series(
    call: call_pb2.Call, edit: str | None, interval: float | None, stop_after: int | None, duration: float | None
) -> types_pb2.CallDecision:
    """Return: run the whole series, as shown or as these say."""
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
        raise CommandError("--stop-after and --duration: no series is that long.") from None
    arguments = call.arguments_json if edit is None else edit.encode()
    return answers.edit(call, arguments, for_series=True, series=edited)


async def find_pending(target: AsyncClient, run_id: str, call_id: str) -> call_pb2.Call:
    """Return a call that waits for somebody; of another user's run one that awaits an approval, for approvers.

    Raises:
        CommandError: it does not.
    """
    for scope in (agent_pb2.PENDING_SCOPE_MINE, agent_pb2.PENDING_SCOPE_STORE):
        with suppress(PermissionDenied):
            async for item in target.pending(agent_pb2.PendingFilter(scope=scope)):
                if isinstance(item, call_pb2.Call) and (item.run_id, item.call_id) == (run_id, call_id):
                    return item
    raise CommandError(f"Call {call_id} of {run_id} does not wait for anybody. `pawl inbox` lists the calls that wait.")


def _decision(call: call_pb2.Call, edit: str | None, reject: str | None, answer: str | None) -> types_pb2.CallDecision:
    if edit is not None:
        return answers.edit(call, edit.encode())
    if reject is not None:
        return decisions.reject(call, reject)
    if answer is not None:
        return decisions.answer(call, answers.chosen(answer.strip(), call))
    if call.state == call_pb2.CALL_STATE_ASKED:
        raise CommandError('This is a question: answer it with --answer "...".')
    return decisions.approve(call)


@asynccontextmanager
async def remembered(
    target: AsyncClient, call: call_pb2.Call, reach: Any, *, lasts: str | None = None, uses: int = 0
) -> AsyncIterator[rule_pb2.Rule]:
    """Make a rule that allows the tool of a call, then let the body approve the call; if that fails, revoke the rule.

    So both happen or neither. The rule ends after a time like 2h, else when it is revoked, and after so many `uses`,
    unless that is 0.

    Raises:
        CommandError: no rule can replace this approval; or the approval failed and the rule could not be revoked.
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
        except Exception as failure:  # noqa: BLE001  # whatever it is, both are reported
            first = explain(error, list(target.agent)) if isinstance(error, Exception) else "It was interrupted."
            raise CommandError(
                f"{first} And the rule {made.rule_id}, which was made for it, is still in force:"
                f" {explain(failure, list(target.tools), 'tools')} End it with `pawl rules revoke {made.rule_id}`."
            ) from None
        raise


def told(rule: rule_pb2.Rule) -> str:
    """Return what to say about a rule that goes with an approval."""
    return f"From now on: {access.says(rule)}. End it with: pawl rules revoke {rule.rule_id}"


async def _check_rememberable(target: AsyncClient, call: call_pb2.Call) -> None:
    if call.state != call_pb2.CALL_STATE_AWAITING_APPROVAL:
        raise CommandError("Only an approval can be remembered, and this call does not wait for one.")
    if call.approval.approvals_required > 1:
        raise CommandError("This call needs two people each time: no rule can replace them.")
    try:
        await target.get(call.run_id)
    except RunNotFound:
        raise CommandError("Rules are valid for your own runs, and this is a run of another user.") from None
