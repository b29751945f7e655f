"""The places that tools may reach, from a file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pawl.chassis.start import StartError
from pawl.tool_registry.domain.egress import EgressRules, read_rules


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    hosts: list[str] | None = None
    private: list[str] = msgspec.field(default_factory=list)


def read_egress_file(path: Path | None) -> dict[str, EgressRules]:
    """Return the rules of each store, `*` for all that have none of their own; none without a file.

    Raises:
        StartError: the file cannot be read, or has an entry that cannot be used.
    """
    if path is None:
        return {}
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=dict[str, _Entry])
        return {store: read_rules(entry.hosts, entry.private) for store, entry in entries.items()}
    except OSError as error:
        raise StartError(f"PAWL_EGRESS_FILE: cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        form = '{"*": {"hosts": ["*.example.com"], "private": ["10.1.2.3:8080"]}}'
        raise StartError(f"PAWL_EGRESS_FILE: {path} must be JSON like {form}: {error}") from None
    except ValueError as error:
        raise StartError(f"PAWL_EGRESS_FILE: {path}: {error}") from None
