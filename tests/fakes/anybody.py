"""An authenticator that asks nobody for a key, for tests of something else."""

from __future__ import annotations

from collections.abc import Mapping

from pawl.chassis.auth import SERVICE, KeyAuthenticator, Principal

_KEY = "the-only-key-there-is"


class Anybody(KeyAuthenticator):
    """Takes everybody for whoever is wanted: a service, or the user whom the metadata name."""

    def __init__(self) -> None:
        super().__init__(local_key=_KEY)

    def authenticate(self, metadata: Mapping[str, str], *, service_only: bool) -> Principal:
        if service_only:
            return SERVICE
        return super().authenticate({**metadata, "authorization": f"Bearer {_KEY}"}, service_only=False)
