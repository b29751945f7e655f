"""Completion tokens, and the value that a tool returns after handing one out."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from pawl.chassis.process.tasks import Handover


@dataclass(frozen=True, slots=True)
class Awaited:
    """The return value of a tool whose call will be completed externally.

    The tool has returned, but the call stays open.
    """


class CompletionToken:
    """A token that allows its holder to complete a call.

    Once `completion_token` has returned it, the token survives the end of any process.
    """

    def __init__(self, token: str, url: str, kept: Future[None]) -> None:
        # An opaque string. Treat it as a secret, because anyone who has it can complete the call.
        self.token = token
        # The URL to which the result is posted. Empty if the deployment has no public URL.
        self.url = url
        self._kept = Handover(kept)

    def __await__(self) -> Generator[Any, None, Self]:
        yield from self._kept.__await__()
        return self

    def __repr__(self) -> str:
        return "CompletionToken(...)"
