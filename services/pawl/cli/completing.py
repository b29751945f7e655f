"""`pawl complete`: the end of a call, from outside."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.console import Console

from pawl.chassis.strict_json import loads
from pawl.cli.command import command, secret_of
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient
from pawl.errors import InvalidJson

_RESULT_BYTES_MAX: Final = 1024 * 1024
_HELP: Final = "The completion token, which the tool gave away; - reads it, @FILE from a file: commands can be seen."


@command(asks="tools")
async def complete(
    target: AsyncClient,
    console: Console,
    token: Annotated[str, typer.Argument(help=_HELP)],
    *,
    result: Annotated[str | None, typer.Option("--result", help="The result of the call, in JSON.")] = None,
    error: Annotated[str, typer.Option("--error", help="Why there is none, for the model.")] = "",
) -> None:
    """Complete a call whose tool waits for somebody outside: with its result, or with an error."""
    if (result is None) == (not error):
        raise CommandError("Say how the call ended: --result JSON or --error TEXT.")
    try:
        value = None if result is None else loads(result.encode(), bytes_max=_RESULT_BYTES_MAX)
    except InvalidJson as refused:
        raise CommandError(f"--result is not JSON: {refused.message}. A text stands in quotes.") from None
    known = await target.complete_call(secret_of(token), value, error=error)
    console.print("The call had this end already." if known else "Completed.")
