"""Users' decisions on a call or on a series of calls. The rules are in `calls` and `grants`."""

from __future__ import annotations

from datetime import datetime

import msgspec

from pawl.chassis.ids import CallId, CommandId, CredentialId, UserId
from pawl.values import DecisionKind, Series


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """The user behind an action, the credential used, and other people involved, such as the creators of the key.

    `delegate_user_id` is the delegate that acts for the user, if any. `people` matters only if several people must
    approve. An empty field means that the value is unknown.
    """

    user_id: UserId
    credential_id: CredentialId = CredentialId("")
    delegate_user_id: UserId = UserId("")
    people: tuple[UserId, ...] = ()


class Decision(Actor, frozen=True, kw_only=True):
    """A user's decision on a call, with the arguments and digest that the call must still have when it starts.

    The arguments and the digest come from the call as it was shown or edited. If `series` is set, the decision covers
    all calls of the series.
    """

    command_id: CommandId
    kind: DecisionKind
    reason: str
    time: datetime
    digest: str
    arguments_sha256: bytes
    series: Series | None = None


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The approval of a series of calls, given together with the approval of the call `call_id`.

    Later calls may start only if they match the grant.

    `uses` counts the calls started under the grant, including `call_id`. `round` is the round of the last of these
    calls. `arguments` is set if a person edited the arguments. A grant with `ended` set covers no more calls.
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
