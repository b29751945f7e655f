"""Defines the background state of a conversation: its jobs and their notices. The rules are in `jobs`."""

from __future__ import annotations

from collections.abc import Container
from datetime import datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import RunId, UserId


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A reference to a report of the job `run_id`, about the iteration `occasion` or, if that is 0, the job's end.

    `user_id` is the user who started the job. `entered_by` is the run of that user whose model received the notice and
    has not answered yet; empty if there is none. `tries` counts the failed turns that contained the notice.
    """

    run_id: RunId
    user_id: UserId
    occasion: int
    entered_by: RunId = RunId("")
    tries: int = 0


class OpenJob(msgspec.Struct, frozen=True, kw_only=True):
    run_id: RunId
    user_id: UserId


class TurnTime(msgspec.Struct, frozen=True, kw_only=True):
    user_id: UserId
    time: datetime


class Background(msgspec.Struct, frozen=True, kw_only=True):
    """The background state of a conversation: open jobs, notices, and start times of recent turns.

    Jobs and turns are counted per user. `used_up_budgets` lists the runs whose shared budget a turn has used up since
    the last message; no more turns start on these budgets.
    """

    open_jobs: tuple[OpenJob, ...] = ()
    notices: tuple[Notice, ...] = ()
    turn_times: tuple[TurnTime, ...] = ()
    used_up_budgets: tuple[RunId, ...] = ()

    @property
    def pending(self) -> int:
        """Number of notices that no model has received."""
        return sum(not each.entered_by for each in self.notices)

    def open_jobs_of(self, user_id: UserId) -> int:
        return sum(each.user_id == user_id for each in self.open_jobs)

    def pending_of(self, user_id: UserId) -> tuple[Notice, ...]:
        """Return the notices that a run of this user passes to its model."""
        return tuple(each for each in self.notices if each.user_id == user_id and not each.entered_by)

    def without(self, run_ids: Container[str]) -> Background:
        return replace(self, notices=tuple(each for each in self.notices if each.run_id not in run_ids))

    @property
    def entered(self) -> int:
        """Number of notices that a model has received but not answered."""
        return len(self.notices) - self.pending


NO_BACKGROUND: Final = Background()
