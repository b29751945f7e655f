"""The ways in which an attempt at an MCP call can fail, and the decision whether to retry the call."""

from __future__ import annotations

from typing import Final

from pawl.tool_registry.outcome import doubt
from pawl.tools.rules.definition import ToolDefinition
from pawl.tools.sdk.context import OutcomeUnknown, ResultTooLarge, ToolError
from pawl.values import EffectClass

ATTEMPTS_MAX: Final = 3
# JSON-RPC's code for an internal error of the server.
_INTERNAL_ERROR: Final = -32603


class Fault(Exception):
    """Raised when an attempt at a call does not produce a result. The message contains the reason."""


class Lost(Fault):
    """Raised when the connection ends during an attempt. `never_ran` means that the server cannot have run the call."""

    def __init__(self, problem: str, *, never_ran: bool = False) -> None:
        super().__init__(problem)
        self.never_ran = never_ran


class Refused(Fault):
    """Raised when the server answers with a protocol error."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class TooLarge(Fault):
    """Raised when the server sends more than the limit allows while it has no other running call."""


class Garbled(Fault):
    """Raised when the server's response is not a valid result."""


def check_retry(definition: ToolDefinition, fault: Fault, attempts: int) -> None:
    """Return if the call should be retried after a fault. Otherwise, raise the call's final error.

    Raises:
        ToolError, ResultTooLarge, OutcomeUnknown: The call has ended and is not retried.
    """
    name = definition.name
    may_repeat = definition.effect in {EffectClass.READ_ONLY, EffectClass.IDEMPOTENT}
    match fault:
        case Lost(never_ran=never_ran) if never_ran or may_repeat:
            if attempts >= ATTEMPTS_MAX:
                raise ToolError(f"lost the connection to the server of {name}: {fault}")
        case TooLarge():
            raise ResultTooLarge(f"cannot read the result of {name}: {fault}{doubt(definition)}")
        case Refused(code=code):
            # The server may have failed after the call took effect.
            more = doubt(definition) if code == _INTERNAL_ERROR else ""
            raise ToolError(f"{name} was refused by its server: {fault}{more}")
        case Garbled() if may_repeat:
            raise ToolError(f"the server of {name} sent an invalid result")
        case _:
            raise OutcomeUnknown
