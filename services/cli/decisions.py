"""`pawl inbox` and `approve`: what waits for somebody."""

from __future__ import annotations

import asyncio
import secrets
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.event.v1 import call_pb2
from rich.console import Console

from services.cli import answers
from services.cli.command import perform
from services.cli.failure import CommandError, explain
from services.cli.lines import LineReader
from services.cli.target import Target
from services.cli.transcript import Transcript, hint

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub

_PAGE = 200
_FOR_PEOPLE = frozenset({call_pb2.CALL_STATE_AWAITING_APPROVAL, call_pb2.CALL_STATE_ASKED})
_DECIDABLE = _FOR_PEOPLE | {call_pb2.CALL_STATE_OFFERED}


def inbox(
    context: typer.Context,
    *,
    only_list: Annotated[bool, typer.Option("--list", help="Do not ask for decisions.")] = False,
) -> None:
    """Show what waits for you, and decide.

    Over all runs. Without a terminal, or with `--list`, it only shows.
    """

    async def work(target: Target, console: Console) -> int:
        transcript = Transcript(console)
        async with target.agents() as agents:
            calls = await _pending(agents, target)
            if not calls:
                console.print("Nothing waits for you.")
                return 0
            interactive = not only_list and sys.stdin.isatty()
            keyboard = LineReader() if interactive else None
            if interactive:
                console.print("An empty line goes on to the next, Ctrl-D leaves.", style="dim")
            for call in calls:
                transcript.pending(call)
                if call.state == call_pb2.CALL_STATE_OFFERED:
                    console.print("  waits for a front end", markup=False)
                elif keyboard is None or call.state not in _FOR_PEOPLE:
                    console.print(f"  {hint(call)}", markup=False, soft_wrap=True)
                elif not await _ask(agents, target, call, keyboard, console):
                    return 0
        return 0

    perform(context, work)


async def _pending(agents: AgentServiceAsyncStub, target: Target) -> list[call_pb2.Call]:
    calls: list[call_pb2.Call] = []
    token = ""
    while True:
        request = agent_pb2.ListPendingRequest(page_size=_PAGE, page_token=token)
        page = await agents.ListPending(request, metadata=target.metadata)
        calls += page.calls
        token = page.next_page_token
        if not token:
            return calls


async def _ask(
    agents: AgentServiceAsyncStub, target: Target, call: call_pb2.Call, keyboard: LineReader, console: Console
) -> bool:
    """Take a decision from the keyboard; an empty line goes on to the next call. Returns whether to go on at all."""
    while True:
        console.print(f"{answers.prompt(call)}", end="", markup=False)
        try:
            line = await keyboard.line()
        except asyncio.CancelledError:
            console.print()
            raise
        if line is None:
            console.print()
            return False
        if not line.strip():
            return True
        try:
            decision = answers.decision_of(line, call)
            await _decide(agents, target, decision)
        except answers.Unclear as error:
            console.print(str(error), style="yellow", markup=False)
        except Exception as error:  # noqa: BLE001  # decided by somebody else meanwhile, for example: go on
            console.print(explain(error, list(target.agent)), style="red", markup=False)
            return True
        else:
            console.print(_done(decision), style="green", markup=False)
            return True


def approve(
    context: typer.Context,
    run_id: Annotated[str, typer.Argument(help="Id of the run.", show_default=False)],
    call_id: Annotated[str, typer.Argument(help="Id of the call.", show_default=False)],
    *,
    edit: Annotated[str | None, typer.Option(help="Run it with these arguments: a JSON object.")] = None,
    reject: Annotated[str | None, typer.Option(help="Do not run it; the model is told this reason.")] = None,
    answer: Annotated[str | None, typer.Option(help="Answer a question, or give the result instead.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask whether you are sure.")] = False,
) -> None:
    """Decide about a call that waits.

    Shows it, then approves it, or runs it with other arguments, or rejects it, or
    answers it.
    """

    async def work(target: Target, console: Console) -> int:
        if sum(option is not None for option in (edit, reject, answer)) > 1:
            raise CommandError("Give only one of --edit, --reject and --answer.")
        async with target.agents() as agents:
            call = await find_pending(agents, target, run_id, call_id)
            if call.state not in _DECIDABLE:
                raise CommandError(f"The outcome of {call_id} is unknown. Say what became of it with `pawl resolve`.")
            Transcript(console).pending(call)
            decision = _decision(call, edit, reject, answer)
            sure = yes or decision.kind != call_pb2.DECISION_KIND_APPROVE or not sys.stdin.isatty()
            if not sure and not typer.confirm("Run it like this?"):
                return 1
            await _decide(agents, target, decision)
            console.print(_done(decision), style="green", markup=False)
        return 0

    perform(context, work)


async def find_pending(agents: AgentServiceAsyncStub, target: Target, run_id: str, call_id: str) -> call_pb2.Call:
    """Return a call that waits for somebody.

    Raises:
        CommandError: it does not.
    """
    run = (await agents.GetRun(agent_pb2.GetRunRequest(run_id=run_id), metadata=target.metadata)).run
    for call in run.pending_calls:
        if call.call_id == call_id:
            return call
    raise CommandError(f"Call {call_id} of {run_id} does not wait for anybody. `pawl inbox` lists the calls that wait.")


def _decision(call: call_pb2.Call, edit: str | None, reject: str | None, answer: str | None) -> types_pb2.CallDecision:
    if edit is not None:
        return answers.edit(call, edit.encode())
    if reject is not None:
        return answers.reject(call, reject)
    if answer is not None:
        return answers.answer(call, answer)
    if call.state == call_pb2.CALL_STATE_ASKED:
        raise CommandError('This is a question: answer it with --answer "...".')
    return answers.approve(call)


async def _decide(agents: AgentServiceAsyncStub, target: Target, decision: types_pb2.CallDecision) -> None:
    request = agent_pb2.DecideRequest(
        request_id=f"cli_{secrets.token_hex(12)}", run_id=decision.run_id, decision=decision
    )
    await agents.Decide(request, metadata=target.metadata)


def _done(decision: types_pb2.CallDecision) -> str:
    done = {
        call_pb2.DECISION_KIND_APPROVE: "Approved.",
        call_pb2.DECISION_KIND_EDIT: "Approved with your arguments.",
        call_pb2.DECISION_KIND_REJECT: "Rejected.",
        call_pb2.DECISION_KIND_ANSWER: "Answered.",
    }
    return done[decision.kind]
