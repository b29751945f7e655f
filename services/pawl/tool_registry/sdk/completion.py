"""Calls whose end comes from outside: the token that a tool gives away, and what it returns then."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from pawl.chassis.process.tasks import Handover


@dataclass(frozen=True, slots=True)
class Awaited:
    """The value that a tool returns whose call somebody outside completes: its code has ended, the call has not."""


class CompletionToken:
    """The right to complete a call. Once it is awaited (in a sync tool: made) it outlives the end of every process."""

    def __init__(self, token: str, url: str, kept: Future[None]) -> None:
        self.token = token
        """Opaque; as secret as what it can do."""
        self.url = url
        """The address to which the result is sent by HTTP; empty if the deployment has no public one."""
        self._kept = Handover(kept)

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self._kept.__await__()
        return self

    def __repr__(self) -> str:
        return "CompletionToken(...)"
