"""The call that takes the effect of another back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Inverse:
    """The call that takes the effect of another one back.

    It is an ordinary call of a tool of the registry: checked, gated and journaled
    as if the model had asked for it. `summary` says in one line, to people, what it
    does.
    """

    tool_name: str
    arguments: Mapping[str, Any]
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reversible:
    """The result of a tool whose effect can be taken back: the model gets `value`, the ledger keeps `inverse`."""

    value: Any
    inverse: Inverse
