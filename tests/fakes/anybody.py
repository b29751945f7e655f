"""An authenticator that asks nobody for a key, for tests of something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from pawl.chassis.identity.auth import Principal, local_principal
from pawl.chassis.identity.credentials import KeyAuthenticator
from pawl.chassis.identity.roles import AGENT_LOOP, MAILBOX, TOOL_REGISTRY


class Anybody(KeyAuthenticator):
    """Takes everybody for the user whom the metadata name, who may also do what other services may."""

    async def authenticate(
        self, metadata: Mapping[str, str], *, source: str, may_look_up: Callable[[], bool] = lambda: True
    ) -> Principal:
        principal = local_principal(metadata)
        return replace(principal, rights=principal.rights | {AGENT_LOOP, MAILBOX, TOOL_REGISTRY})
