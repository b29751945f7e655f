"""The connections of one source: which of them a call may use, and when the next one may be tried."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.shares import share

if TYPE_CHECKING:
    from pawl.tool_registry.adapters.mcp.session import Session

SESSIONS_MAX: Final = 200
SESSIONS_OF_USER_MAX: Final = 20
_BACKOFF_SECONDS_MAX: Final = 60.0
_STABLE_SECONDS: Final = 60.0


@dataclass(slots=True)
class Pool:
    """The connections of one source, open or opening.

    Each user has their own, or all share one if the source is declared stateless. Once the server has asked
    something, each carries one call at a time and none is shared: a question does not name its call.
    """

    made_of: tuple[Any, ...] = ()
    """The configuration and secrets of the connections."""
    sessions: list[Session] = field(default_factory=list)
    is_asking: bool = False
    problem: str = ""
    not_before: float = 0.0
    """The time from which the next connection may be opened, by the monotonic clock."""
    _failures: int = 0

    def renew(self, made_of: tuple[Any, ...]) -> Sequence[Session]:
        """Start anew if the configuration is another one; returns the connections that are of no use any more."""
        if self.made_of == made_of:
            return ()
        stale, self.sessions = self.sessions, []
        self.made_of, self.problem, self.not_before, self._failures = made_of, "", 0.0, 0
        return stale

    def find(self, user_id: UserId, call_id: str, now: float, *, is_alone: bool = False) -> Session | None:
        """Return a connection that may carry a call, perhaps as its only one; None if a new one is needed."""
        self._learn(now)
        alone = self.is_asking or is_alone
        good = (one for one in self.sessions if one.may_carry(user_id, call_id, alone=alone))
        return next(good, None)

    def spent(self, user_id: UserId) -> Sequence[Session]:
        """Return a user's own connections that no call uses, and only calls that were left could use again."""
        return [one for one in self.sessions if one.owner == user_id and not one.is_busy] if self.is_asking else ()

    def recover(self, now: float) -> None:
        """End the back-off, because the server has just answered."""
        self._learn(now)
        self.problem, self.not_before, self._failures = "", 0.0, 0

    def _learn(self, now: float) -> None:
        """Take out what has ended, and remember why."""
        self.is_asking = self.is_asking or any(one.has_asked for one in self.sessions)
        for ended in [one for one in self.sessions if not one.is_open]:
            self.sessions.remove(ended)
            if ended.problem:
                self._failed(ended, min(ended.ended_at, now))

    def _failed(self, session: Session, ended_at: float) -> None:
        lived = ended_at - session.began_at
        self.problem = session.problem
        self._failures = 1 if lived > _STABLE_SECONDS else self._failures + 1
        pause = 0.0 if self._failures == 1 else min(2.0 ** (self._failures - 2), _BACKOFF_SECONDS_MAX)
        self.not_before = max(self.not_before, ended_at + pause)


def crowd(
    sessions: Iterable[tuple[StoreId, Session]], store_id: StoreId, owner: UserId | None
) -> tuple[Sequence[Session], str] | None:
    """Return the connections of which one has to end before a store may have another one, and the limit in words.

    `sessions` are those of all stores. None: there is room. `owner` is whose the new one is to be. A store may have
    its `share`.
    """
    everywhere = [(store, one) for store, one in sessions if one.is_open]
    of_store = [one for store, one in everywhere if store == store_id]
    of_others = len(everywhere) - len(of_store)
    of_user = [one for one in of_store if owner is not None and one.owner == owner]
    for found, most, whose in (
        (of_user, SESSIONS_OF_USER_MAX, " of this user"),
        (of_store, share(SESSIONS_MAX, of_others), " of this store"),
        ([one for _, one in everywhere], SESSIONS_MAX, ""),
    ):
        if len(found) >= most:
            return found, f"{most} connections{whose} are in use here, which is the limit"
    return None
