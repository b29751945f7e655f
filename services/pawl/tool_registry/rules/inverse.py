"""The call that takes the effect of another one back, as it is kept."""

from __future__ import annotations

from typing import Final

import msgspec

from pawl.tool_registry.rules.definition import ARGUMENTS_BYTES_MAX

SUMMARY_CHARACTERS_MAX: Final = 300


class InverseCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool, with canonical arguments; `summary` says in one line what it does."""

    tool_name: str
    arguments: bytes
    summary: str


def inverse_call(tool_name: str, arguments: bytes, summary: str) -> InverseCall:
    """Return an inverse within its limits.

    Raises:
        ValueError: its arguments are more than any call can have.
    """
    if len(arguments) > ARGUMENTS_BYTES_MAX:
        raise ValueError(f"an inverse may have arguments of {ARGUMENTS_BYTES_MAX} bytes")
    return InverseCall(tool_name=tool_name, arguments=arguments, summary=summary[:SUMMARY_CHARACTERS_MAX])
