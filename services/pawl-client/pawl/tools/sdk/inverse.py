"""Inverses of calls. An inverse is another call that undoes a call's effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Inverse:
    """A call that undoes another call's effect.

    It is an ordinary tool call, which is checked, gated and journaled as if the model had requested it. `summary`
    describes it to users in one line.
    """

    tool_name: str
    arguments: Mapping[str, Any]
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reversible:
    """A result with its inverse. The model sees `value`, and the ledger stores `inverse`."""

    value: Any
    inverse: Inverse
