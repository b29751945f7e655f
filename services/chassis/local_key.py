"""The key of a suite on one machine: `pawl up` makes it, its clients read it, and it goes to that suite only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.chassis.settings import is_loopback

LOCAL_KEY = "local-key"
"""The name of its file in the folder of secrets."""


def find_key(addresses: Iterable[str], *, data: Path | None = None, environment: Mapping[str, str]) -> str | None:
    """Return the key to send to these addresses: PAWL_API_KEY, else that of the suite that listens on all of them.

    The suite is the one that runs on `data`, else on PAWL_DATA, else on `.pawl`.
    Its key is for it alone: for other addresses there is none.
    """
    given = environment.get("PAWL_API_KEY")
    if given:
        return given
    folder = data or Path(environment.get("PAWL_DATA") or ".pawl")
    wanted = set(addresses)
    if not wanted <= _listening(folder):
        return None
    try:
        descriptor = os.open(folder / "secrets" / LOCAL_KEY, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, encoding="utf-8") as file:
            return file.read().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _listening(data: Path) -> set[str]:
    """Return the addresses on this machine at which the suite of that folder says that it listens."""
    try:
        endpoints: dict[str, Any] = msgspec.json.decode((data / "endpoints.json").read_bytes(), type=dict[str, Any])
        found = {str(replica["grpc"]) for replicas in endpoints["services"].values() for replica in replicas}
        return {address for address in found if address and is_loopback(address)}
    except (OSError, msgspec.MsgspecError, AttributeError, KeyError, TypeError, ValueError):
        return set()
