"""`pawl resolve`: what an operator found out about a call whose outcome is unknown."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from pawl.agent.v1 import agent_pb2
from pawl.cli import answers
from pawl.cli.attention import runs_in_need
from pawl.cli.command import command, new_request_id
from pawl.cli.failure import CommandError
from pawl.cli.target import Target
from pawl.cli.transcript import Transcript


@command()
async def resolve(
    target: Target,
    console: Console,
    run_id: Annotated[str, typer.Argument(help="Id of the run.", show_default=False)],
    call_id: Annotated[str, typer.Argument(help="Id of the call.", show_default=False)],
    *,
    happened: Annotated[str | None, typer.Option(help="It happened; this JSON value is its result.")] = None,
    run_again: Annotated[bool, typer.Option("--run-again", help="It did not happen: run it.")] = False,
    tell_model: Annotated[bool, typer.Option("--tell-model", help="It did not happen: tell the model.")] = False,
) -> None:
    """Say what became of a call in doubt.

    For runs that need attention, of any user of the store: a process died in the
    middle of an effect. Look there whether it happened, then say so. Needs the
    role operator or admin where there are API keys.
    """
    request = _request(run_id, call_id, happened, run_again=run_again, tell_model=tell_model)
    runs = await runs_in_need(target, run_id)
    # Of several large ones only the first is listed; about the others the ledger has the word.
    for call in (call for run in runs for call in run.calls if call.call_id == call_id):
        Transcript(console).pending(call)
    await target.agents.ResolveCall(request)
    console.print("Resolved.", style="green", markup=False)


def _request(
    run_id: str, call_id: str, happened: str | None, *, run_again: bool, tell_model: bool
) -> agent_pb2.ResolveCallRequest:
    if (happened is not None) + run_again + tell_model != 1:
        raise CommandError("Give one of --happened JSON, --run-again and --tell-model.")
    request = agent_pb2.ResolveCallRequest(
        request_id=new_request_id(),
        run_id=run_id,
        call_id=call_id,
        resolution=agent_pb2.RESOLUTION_RUN_AGAIN if run_again else agent_pb2.RESOLUTION_TELL_MODEL,
    )
    if happened is not None:
        request.resolution = agent_pb2.RESOLUTION_HAPPENED
        request.content_json = answers.checked_result(happened, "Text needs quotes: --happened '\"sent\"'.")
    return request
