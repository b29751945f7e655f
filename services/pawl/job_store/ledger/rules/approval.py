"""Decisions of people, about a call or about all calls of a series. The rules are in `calls` and `grants`."""

from __future__ import annotations

from datetime import datetime

import msgspec

from pawl.chassis.ids import CallId, CommandId, CredentialId, UserId
from pawl.values import DecisionKind, Series


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of a person about a call, and what the call must then look like to start.

    `digest` and `arguments_sha256` are those of what was approved: of the call
    as shown, or of the edited one. `credential_id` made it, as `delegate_user_id` for
    the user if a delegate did; both are empty if unknown. `people` are others whose act it is, too. With
    a `series` it is about all calls of that.
    """

    command_id: CommandId
    kind: DecisionKind
    user_id: UserId
    reason: str
    time: datetime
    digest: str
    arguments_sha256: bytes
    credential_id: CredentialId = CredentialId("")
    delegate_user_id: UserId = UserId("")
    people: tuple[UserId, ...] = ()
    series: Series | None = None


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The approval of a series, given with the call `call_id`, and what its calls must look like to start.

    `uses` have begun under it, that call included, the last one in `round`. `arguments` are those of the job, where
    somebody has edited them. One that has `ended` covers nothing any more.
    """

    series: Series
    call_id: CallId
    tool_name: str
    tool_version: int
    arguments_sha256: bytes
    approvals: tuple[Decision, ...]
    uses: int
    round: int
    arguments: bytes = b""
    ended: bool = False
