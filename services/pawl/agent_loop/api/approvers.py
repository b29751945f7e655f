"""Permissions to decide on calls."""

from __future__ import annotations

from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import APPROVERS
from pawl.values import DecisionRight


def decision_right(caller: Principal) -> DecisionRight:
    """Return which calls the caller may decide on.

    Approvers and admins decide on gated calls in the whole store. Users who only have other roles may not decide on any
    calls. Users without roles decide on the calls of their own runs. Only a run's own user can answer its questions.
    """
    if caller.roles & APPROVERS:
        return DecisionRight.STORE
    return DecisionRight.QUESTIONS if caller.roles else DecisionRight.OWN_RUNS
