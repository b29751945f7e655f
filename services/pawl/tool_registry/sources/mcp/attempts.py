"""What goes wrong with an attempt at a call of an MCP tool, and whether the call is made again."""

from __future__ import annotations

from typing import Final

from pawl.tool_registry.rules.definition import ToolDefinition
from pawl.tool_registry.sdk.context import OutcomeUnknown, ResultTooLarge, ToolError
from pawl.tool_registry.sdk.outcome import doubt
from pawl.values import EffectClass

ATTEMPTS_MAX: Final = 3
# JSON-RPC's code for what broke on the server's side.
_INTERNAL_ERROR: Final = -32603


class Fault(Exception):
    """An attempt at a call brought no result; the text says why."""


class Lost(Fault):
    """The connection ended in the middle of it; `never_ran` if the server cannot have run the call."""

    def __init__(self, problem: str, *, never_ran: bool = False) -> None:
        super().__init__(problem)
        self.never_ran = never_ran


class Refused(Fault):
    """The server answered with an error of the protocol, in its own words."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class TooLarge(Fault):
    """The server sent more than can be read, and this was its only call."""


class Garbled(Fault):
    """The server answered with something that is no result."""


def check_again(definition: ToolDefinition, fault: Fault, attempts: int) -> None:
    """Return if a call is to be made again after a fault of the last of so many attempts.

    Raises:
        ToolError, ResultTooLarge, OutcomeUnknown: the end of the call.
    """
    name = definition.name
    may_repeat = definition.effect in {EffectClass.READ_ONLY, EffectClass.IDEMPOTENT}
    match fault:
        case Lost(never_ran=never_ran) if never_ran or may_repeat:
            if attempts >= ATTEMPTS_MAX:
                raise ToolError(f"the server of {name} went away: {fault}")
        case TooLarge():
            raise ResultTooLarge(f"{name} cannot be read: {fault}{doubt(definition)}")
        case Refused(code=code):
            # What broke may have broken after the effect.
            more = doubt(definition) if code == _INTERNAL_ERROR else ""
            raise ToolError(f"{name} was refused by its server: {fault}{more}")
        case Garbled() if may_repeat:
            raise ToolError(f"the server of {name} answered with what is no result")
        case _:
            raise OutcomeUnknown
