"""The background of a conversation: its jobs, and what they tell it. The rules are in `jobs`."""

from __future__ import annotations

from collections.abc import Container
from datetime import datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import RunId, UserId


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A reference to what the job `run_id` of `user_id` reports: an iteration, or with `occasion` 0 its end.

    `entered_by` is the run of that user whose model was told and has not answered yet, empty as long as none was;
    `tries` are the turns that have failed with it.
    """

    run_id: RunId
    user_id: UserId
    occasion: int
    entered_by: RunId = RunId("")
    tries: int = 0


class OpenJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has not ended, and its user."""

    run_id: RunId
    user_id: UserId


class TurnTime(msgspec.Struct, frozen=True, kw_only=True):
    """When a turn of a user began."""

    user_id: UserId
    time: datetime


class Background(msgspec.Struct, frozen=True, kw_only=True):
    """The background of a conversation: its open jobs, what they tell, and when the last turns of the model began.

    Jobs and turns are counted per user.
    """

    open_jobs: tuple[OpenJob, ...] = ()
    notices: tuple[Notice, ...] = ()
    turn_times: tuple[TurnTime, ...] = ()
    used_up_budgets: tuple[RunId, ...] = ()
    """The runs whose shared budget a turn has used up since the last message; no further turn starts on them."""

    @property
    def pending(self) -> int:
        """The number of notices of which no model was told."""
        return sum(not each.entered_by for each in self.notices)

    def open_jobs_of(self, user_id: UserId) -> int:
        """Return how many jobs of this user are open."""
        return sum(each.user_id == user_id for each in self.open_jobs)

    def pending_of(self, user_id: UserId) -> tuple[Notice, ...]:
        """Return the notices that a run of this user tells its model."""
        return tuple(each for each in self.notices if each.user_id == user_id and not each.entered_by)

    def without(self, run_ids: Container[str]) -> Background:
        """Return it without the notices of some jobs, which are not there any more."""
        return replace(self, notices=tuple(each for each in self.notices if each.run_id not in run_ids))

    @property
    def entered(self) -> int:
        """The number of notices of which a model was told that has not answered them."""
        return len(self.notices) - self.pending


NO_BACKGROUND: Final = Background()
