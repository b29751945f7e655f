"""The digest that binds an approval to exactly one call."""

from __future__ import annotations

import hashlib
from typing import Final

from pawl.chassis.strict_json import dumps_canonical

_SCHEME: Final = "pawl.approval.1"


def call_digest(
    *, store_id: str, run_id: str, call_id: str, tool_name: str, tool_version: int, arguments: bytes
) -> str:
    """Return the SHA-256, in hex, of a call; `arguments` are canonical JSON.

    What is hashed is a JSON array of texts, so no two different calls are
    written the same.
    """
    fields = [_SCHEME, store_id, run_id, call_id, tool_name, str(tool_version), arguments.decode()]
    return hashlib.sha256(dumps_canonical([*fields])).hexdigest()
