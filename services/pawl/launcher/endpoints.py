"""The file with the addresses of a suite, as the launcher writes it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from pawl.chassis.rpc.endpoints import FILE_NAME, Endpoints
from pawl.launcher.secrets import write_private


def write_endpoints(endpoints: Endpoints) -> None:
    """Writes the file whole or not at all."""
    write_private(Path(endpoints.data) / FILE_NAME, json.dumps(msgspec.to_builtins(endpoints), indent=2) + "\n")


def remove_endpoints(data: Path) -> None:
    """Says that no suite runs there any more."""
    (data / FILE_NAME).unlink(missing_ok=True)
