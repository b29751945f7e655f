"""The reasons why a run fails, in groups that a client can branch on."""

from __future__ import annotations

from enum import StrEnum


class FailureClass(StrEnum):
    """The group of a failure. Values are those of pawl.event.v1.FailureClass, without prefix."""

    AUTH = "AUTH"
    RATE = "RATE"
    PROVIDER = "PROVIDER"
    CONTENT_FILTER = "CONTENT_FILTER"
    LIMIT = "LIMIT"
    STUCK = "STUCK"
    INTERNAL = "INTERNAL"
