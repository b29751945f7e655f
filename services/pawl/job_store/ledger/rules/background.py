"""The background state of a conversation: its jobs and their notices. For the rules, see `jobs`."""

from __future__ import annotations

from collections.abc import Container
from datetime import datetime
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import RunId, UserId


class _OfJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job, its user, and the runs above it, to which it reports.

    `above` is empty unless a delegated run started the job. Otherwise it lists, nearest first, the delegated runs above
    the job that are still open, followed by the root run.
    """

    run_id: RunId
    user_id: UserId
    above: tuple[RunId, ...] = ()

    @property
    def receiver(self) -> RunId:
        """The delegated run whose next model call receives the notices.

        Empty if the root conversation receives them.
        """
        return self.above[0] if len(self.above) > 1 else RunId("")


class Notice(_OfJob, frozen=True, kw_only=True):
    """A reference to a report from the job `run_id`. If `occasion` is 0, the report is about the job's end.

    Otherwise, `occasion` is the iteration. `user_id` is the user who started the job. `entered_by` is that user's run
    whose model has received the notice but has not answered yet, or empty if there is none. `tries` counts the failed
    turns that contained the notice.
    """

    occasion: int
    entered_by: RunId = RunId("")
    tries: int = 0


class OpenJob(_OfJob, frozen=True, kw_only=True):
    pass


class TurnTime(msgspec.Struct, frozen=True, kw_only=True):
    user_id: UserId
    time: datetime


class Background(msgspec.Struct, frozen=True, kw_only=True):
    """The background state of a conversation: open jobs, notices, and start times of recent turns.

    Jobs and turns are counted per user. `used_up_budgets` lists runs whose shared budget a turn has used up since the
    last message. No further turns start on those budgets.
    """

    open_jobs: tuple[OpenJob, ...] = ()
    notices: tuple[Notice, ...] = ()
    turn_times: tuple[TurnTime, ...] = ()
    used_up_budgets: tuple[RunId, ...] = ()

    @property
    def pending(self) -> int:
        """The number of notices that no model has received yet."""
        return sum(not each.entered_by for each in self.notices)

    def open_jobs_of(self, user_id: UserId) -> int:
        return sum(each.user_id == user_id for each in self.open_jobs)

    def pending_of(self, user_id: UserId, receiver: RunId = RunId("")) -> tuple[Notice, ...]:
        """Return the notices that this user's run passes to its model.

        The run is `receiver` or, if that is empty, belongs to this conversation.
        """
        waiting = (each for each in self.notices if each.receiver == receiver)
        return tuple(each for each in waiting if each.user_id == user_id and not each.entered_by)

    def opened_below(self, receiver: RunId) -> tuple[RunId, ...]:
        """Return the open jobs that report to a delegated run."""
        return tuple(each.run_id for each in self.open_jobs if each.receiver == receiver)

    def passed_on(self, ended: Container[str], answered_by: RunId = RunId("")) -> Background:
        """Return the state after delegated runs have ended. Each run's notices move to the next run above it.

        Notices that the run `answered_by` received are removed. Notices that another ended run received also move to
        the next run, because no model will read the ended run's conversation again. A notice about an iteration is
        dropped if the job has reported a later iteration.
        """
        notices: list[Notice] = []
        # A job that reported its end is no longer open.
        outdated = {each.run_id for each in self.notices} - {each.run_id for each in self.open_jobs}
        for each in reversed(self.notices):
            is_again = each.entered_by in ended
            is_outdated = is_again and each.occasion > 0 and each.run_id in outdated
            if not (is_outdated or (answered_by and each.entered_by == answered_by)):
                entered_by = RunId("") if is_again else each.entered_by
                outdated |= {each.run_id} if each.occasion and not entered_by else set()
                notices.append(_passed_on(replace(each, entered_by=entered_by), ended))
        open_jobs = tuple(_passed_on(each, ended) for each in self.open_jobs)
        return replace(self, open_jobs=open_jobs, notices=tuple(reversed(notices)))

    def without(self, run_ids: Container[str]) -> Background:
        return replace(self, notices=tuple(each for each in self.notices if each.run_id not in run_ids))

    @property
    def entered(self) -> int:
        """The number of notices that a model has received but not yet answered."""
        return len(self.notices) - self.pending


J = TypeVar("J", bound=_OfJob)


def _passed_on(each: J, ended: Container[str]) -> J:
    open_runs = tuple(run_id for run_id in each.above[:-1] if run_id not in ended)
    return replace(each, above=(*open_runs, *each.above[-1:]))


NO_BACKGROUND: Final = Background()
