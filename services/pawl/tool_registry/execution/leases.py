"""Leases in a record whose clock may jump."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

_GAP_PART: Final = 0.5


class LeaseWatch:
    """The leases of others as this process has seen them, by its own monotonic clock.

    The record says when a lease ends by the record's clock. After a jump forward it
    says so of all leases, until their holders renew them. So one has ended only when
    it has also stood unchanged for a whole lease, in which this process could read
    the record: while the record is away nobody can renew.
    """

    def __init__(self, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._since: dict[str, tuple[datetime, float]] = {}
        self._seen_at = 0.0

    def see(self, ends: Mapping[str, datetime], *, asked_at: float, now: float) -> None:
        """Take in when the leases end, as the record said when asked at `asked_at`, and answered until `now`."""
        since = self._since if asked_at - self._seen_at <= self.lease_seconds * _GAP_PART else {}
        self._since = {
            holder: known if (known := since.get(holder)) is not None and known[0] == end else (end, now)
            for holder, end in ends.items()
        }
        self._seen_at = asked_at

    def unrenewed(self) -> tuple[list[str], list[datetime]]:
        """Return who has not renewed for a whole lease, and the ends of their leases.

        They have no lease if the record has the same end still, and says that it has passed.
        """
        found = [(holder, end) for holder, (end, at) in self._since.items() if self._seen_at - at >= self.lease_seconds]
        return [holder for holder, _ in found], [end for _, end in found]
