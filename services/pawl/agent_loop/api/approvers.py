"""Determines who may decide on calls."""

from __future__ import annotations

from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import APPROVERS
from pawl.values import DecisionRight


def decision_right(caller: Principal) -> DecisionRight:
    """Return which calls the caller may decide on.

    Approvers and admins decide on gated calls in the whole store. Users who only have other roles decide on none. Users
    without roles decide on calls in their own runs. A run's questions can only be answered by its own user.
    """
    if caller.roles & APPROVERS:
        return DecisionRight.STORE
    return DecisionRight.QUESTIONS if caller.roles else DecisionRight.OWN_RUNS
