"""Lowers the limits of new runs to the limits of their store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pawl.event.v1 import run_pb2

_TOKENS: Final = ("total_tokens_max", "topped_up_tokens_max")


def lower(run: run_pb2.Run, most: Mapping[str, int]) -> None:
    """Lower the run's limits to those in `most`, and keep their original values in the run.

    A limit of 0 tokens means no limit. The store's token limit also applies to top-ups.
    """
    limits = run.options.limits
    if (tokens_max := most.get(_TOKENS[0])) is not None:
        most = {**most, _TOKENS[1]: tokens_max}
    for name, value in most.items():
        requested = getattr(limits, name)
        if requested > value or (name in _TOKENS and not requested):
            setattr(limits, name, value)
            run.lowered_limits[name] = requested
