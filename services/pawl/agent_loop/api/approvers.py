"""Who may decide calls."""

from __future__ import annotations

from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import APPROVERS
from pawl.values import DecisionRight


def decision_right(caller: Principal) -> DecisionRight:
    """Return what the caller may decide.

    Approvers and admins decide gated calls of the whole store. Users with only other roles decide none. Users without
    roles decide calls of their own runs. A run's questions are always its user's to answer.
    """
    if caller.roles & APPROVERS:
        return DecisionRight.STORE
    return DecisionRight.QUESTIONS if caller.roles else DecisionRight.OWN_RUNS
