"""`pawl approve`: one call that waits for somebody."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.console import Console

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.cli import answers, wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, Yes, command, is_sure
from pawl.cli.failure import CommandError
from pawl.cli.remembering import Reach, remembered, told
from pawl.cli.transcript import Transcript
from pawl.client import AsyncClient, decisions
from pawl.errors import PermissionDenied, RunNotFound
from pawl.event.v1 import call_pb2


@command()
async def approve(
    target: AsyncClient,
    console: Console,
    run_id: Annotated[str, typer.Argument(help="Id of the run.", show_default=False)],
    call_id: Annotated[str, typer.Argument(help="Id of the call.", show_default=False)],
    *,
    edit: Annotated[str | None, typer.Option(help="Run it with these arguments: a JSON object.")] = None,
    reject: Annotated[str | None, typer.Option(help="Do not run it; the model is told this reason.")] = None,
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
    remember: Annotated[
        Reach | None,
        typer.Option(
            help="Approve, and let the same tool run without an approval here from now on.", show_default=False
        ),
    ] = None,
    lasts: Annotated[str | None, typer.Option("--for", help="How long to remember it: 30m, 2h, 7d.")] = None,
    uses: Annotated[int | None, typer.Option(min=1, help="For how many calls to remember it.")] = None,
    yes: Yes = False,
) -> int:
    """Decide about a call that waits.

    Shows it, then approves it, or runs it with other arguments, or rejects it, or
    answers it. With --remember it makes a rule too (`pawl rules`), and does both or
    neither.
    """
    _check_options((edit, reject, answer), remember=remember, lasts=lasts, uses=uses)
    terms = (interval, stop_after, duration)
    _check_series(series=series, others=(reject, answer, remember), terms=terms)
    call = await find_pending(target, run_id, call_id)
    if call.state not in answers.DECIDABLE:
        raise CommandError(f"The outcome of {call_id} is unknown. Say what became of it with `pawl resolve`.")
    Transcript(console).pending(call)
    decision = _for_series(call, edit, *terms) if series else _decision(call, edit, reject, answer)
    if decision.for_series and decision.HasField("edited_series"):
        console.print(f"granted: {wording.series_text(decision.edited_series)}", markup=False)
    if decision.kind == call_pb2.DECISION_KIND_APPROVE and not is_sure(
        "Grant the series like this?" if series else "Run it like this?", yes=yes
    ):
        return EXIT_UNSUCCESSFUL
    if remember is None:
        await target.decide(decision)
        console.print(answers.done(decision, call), style="green", markup=False)
        return 0
    async with remembered(target, call, remember, lasts=lasts, uses=uses or 0) as rule:
        await target.decide(decision)
    console.print(f"{answers.done(decision, call)} {told(rule)}", style="green", markup=False, soft_wrap=True)
    return 0


def _check_options(
    others: Sequence[str | None], *, remember: Reach | None, lasts: str | None, uses: int | None
) -> None:
    given = sum(option is not None for option in others)
    if given > 1:
        raise CommandError("Give only one of --edit, --reject and --answer.")
    if given and remember is not None:
        raise CommandError("--remember goes with an approval, not with --edit, --reject or --answer.")
    if remember is None and (lasts is not None or uses is not None):
        raise CommandError("--for and --uses go with --remember.")


def _check_series(
    *, series: bool, others: Sequence[object | None], terms: tuple[float | None, int | None, float | None]
) -> None:
    if series and any(other is not None for other in others):
        raise CommandError("--series goes with an approval or --edit, not with --reject, --answer or --remember.")
    if not series and any(term is not None for term in terms):
        raise CommandError("--interval, --stop-after and --duration go with --series.")


def _for_series(
    call: call_pb2.Call, edit: str | None, interval: float | None, stop_after: int | None, duration: float | None
) -> types_pb2.CallDecision:
    """Return: run the whole series, as shown or as these say."""
    if interval is stop_after is duration is None:
        return answers.series(call) if edit is None else answers.edit(call, edit.encode(), for_series=True)
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
    try:
        run = await target.get(run_id)
    except RunNotFound:
        calls = await _of_others(target, run_id)
        if not calls:
            raise
    else:
        calls = list(run.pending_calls)
    for call in calls:
        if call.call_id == call_id:
            return call
    raise CommandError(f"Call {call_id} of {run_id} does not wait for anybody. `pawl inbox` lists the calls that wait.")


async def _of_others(target: AsyncClient, run_id: str) -> list[call_pb2.Call]:
    """Return the calls of a run that await an approval, if the caller may see those of the store."""
    wanted = agent_pb2.PendingFilter(scope=agent_pb2.PENDING_SCOPE_STORE)
    try:
        items = [item async for item in target.pending(wanted)]
    except PermissionDenied:
        return []
    return [item for item in items if isinstance(item, call_pb2.Call) and item.run_id == run_id]


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
