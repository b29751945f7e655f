"""Decisions of people, about a call or about all calls of a series. The rules are in `calls` and `grants`."""

from __future__ import annotations

from datetime import datetime

import msgspec

from pawl.chassis.ids import CallId, CommandId, CredentialId, UserId
from pawl.values import DecisionKind, Series


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """Whose act something is: of `user_id`, with a credential, and of `people` too where several people are needed.

    `delegate_user_id` is the user of the delegate that acts for the user, if one does. Empty fields are unknown.
    """

    user_id: UserId
    credential_id: CredentialId = CredentialId("")
    delegate_user_id: UserId = UserId("")
    people: tuple[UserId, ...] = ()


class Decision(Actor, frozen=True, kw_only=True):
    """The decision of a person about a call, and what the call must then look like to start.

    `digest` and `arguments_sha256` are those of what was approved: of the call
    as shown, or of the edited one. With a `series` it is about all calls of that.
    """

    command_id: CommandId
    kind: DecisionKind
    reason: str
    time: datetime
    digest: str
    arguments_sha256: bytes
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
