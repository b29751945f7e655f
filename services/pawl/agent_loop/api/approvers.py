"""The rights to decide (settled points 6 and 7)."""

from __future__ import annotations

from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import APPROVERS
from pawl.values import DecisionRight


def decision_right(caller: Principal) -> DecisionRight:
    """Return what the caller may decide.

    Approvers and admins decide gated calls of their whole store. Who has other
    roles and not these decides none; who has no roles at all decides about their
    own runs. The questions of a run are its user's in any case.
    """
    if caller.roles & APPROVERS:
        return DecisionRight.STORE
    return DecisionRight.QUESTIONS if caller.roles else DecisionRight.OWN_RUNS
