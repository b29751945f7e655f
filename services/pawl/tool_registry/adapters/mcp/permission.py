"""The rights of programs: which are started at all, and what none of them reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pawl.chassis.ids import StoreId
from pawl.chassis.start import StartError
from pawl.errors import PermissionDenied
from pawl.tool.v1.source_pb2 import McpStdioConfig
from pawl.tool_registry.adapters.mcp.program import MEMORY_BYTES_DEFAULT, PROCESSES_DEFAULT, ProgramOrder
from pawl.tool_registry.domain.programs import ProgramRule, WantedProgram, check_rule, objection


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The deployment's rules for programs.

    Without `rules` stores may have any program started, which is for one machine
    that has one user; then a program without folders of its own reads what that
    user may. `private` paths are reached by none.
    """

    rules: Mapping[str, Sequence[ProgramRule]] | None
    private: Sequence[str] = ()
    is_confined: bool = True

    def order(self, server: McpStdioConfig, secrets: Mapping[str, str]) -> ProgramOrder:
        """Return how to start a server that `check` has let pass."""
        return ProgramOrder(
            command=list(server.command),
            environment={**server.environment, **secrets},
            readable=list(server.readable_paths),
            writable=list(server.writable_paths),
            private=self.private,
            is_confined=self.is_confined,
            reads_all=self.rules is None and not server.readable_paths and not server.writable_paths,
            memory_bytes_max=server.memory_bytes_max or MEMORY_BYTES_DEFAULT,
            processes_max=server.processes_max or PROCESSES_DEFAULT,
        )

    def check(self, store_id: StoreId, server: McpStdioConfig) -> None:
        """Refuse what the deployment does not allow with PermissionDenied, which gives the reason."""
        if self.rules is None:
            return
        wanted = WantedProgram(
            command=server.command,
            variables={*server.environment, *server.secret_environment},
            paths=[*server.readable_paths, *server.writable_paths],
        )
        reason = objection(self.rules, store_id, wanted)
        if reason:
            raise PermissionDenied(f"{reason}: whoever runs it lists programs in PAWL_MCP_PROGRAMS_FILE")


def read_programs_file(path: Path | None) -> dict[str, list[ProgramRule]]:
    """Return the rules of each store, `*` for all that have none of their own; none without a file.

    Raises:
        StartError: the file cannot be read, or has an entry that cannot be used.
    """
    if path is None:
        return {}
    try:
        rules = msgspec.json.decode(path.read_bytes(), type=dict[str, list[ProgramRule]])
        for rule in (rule for some in rules.values() for rule in some):
            check_rule(rule)
    except OSError as error:
        raise StartError(f"PAWL_MCP_PROGRAMS_FILE: cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        form = '{"*": [{"command": ["/opt/mcp/bin/time"], "variables": ["TZ"], "paths": ["/srv/data"]}]}'
        raise StartError(f"PAWL_MCP_PROGRAMS_FILE: {path} must be JSON like {form}: {error}") from None
    except ValueError as error:
        raise StartError(f"PAWL_MCP_PROGRAMS_FILE: {path}: {error}") from None
    return rules
