"""The programs that may be started, and the paths that no program may access."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pawl.chassis.ids import StoreId
from pawl.chassis.process.start import StartError
from pawl.errors import PermissionDenied
from pawl.tool.v1.source_pb2 import McpStdioConfig
from pawl.tool_registry.sources.mcp.rules import ProgramRule, check_rule, refusal_reason
from pawl.tool_registry.sources.mcp.sandbox import MEMORY_BYTES_DEFAULT, PROCESSES_DEFAULT, Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The deployment's rules for programs.

    If `rules` is None, stores may start any program, and a program with no listed folders can read everything that the
    machine's user can read. This is meant only for single-user machines. Confined programs may never access `private`
    paths.
    """

    rules: Mapping[str, Sequence[ProgramRule]] | None
    private: Sequence[str] = ()
    is_confined: bool = True

    def order(self, store_id: StoreId, server: McpStdioConfig, secrets: Mapping[str, str]) -> Order:
        """Return the sandbox order that starts one of a store's servers.

        Raises:
            PermissionDenied: The deployment does not allow the program. The message explains why.
        """
        paths = [*server.readable_paths, *server.writable_paths]
        if self.rules is not None:
            variables = {*server.environment, *server.secret_environment}
            requested = ProgramRule(command=list(server.command), variables=variables, paths=paths)
            reason = refusal_reason(self.rules, store_id, requested)
            if reason:
                raise PermissionDenied(f"{reason}; its operator can list programs in PAWL_MCP_PROGRAMS_FILE")
        return Order(
            command=list(server.command),
            environment={**server.environment, **secrets},
            readable=list(server.readable_paths),
            writable=list(server.writable_paths),
            private=list(self.private),
            is_confined=self.is_confined,
            reads_all=self.rules is None and not paths,
            memory_bytes_max=server.memory_bytes_max or MEMORY_BYTES_DEFAULT,
            processes_max=server.processes_max or PROCESSES_DEFAULT,
        )


def read_programs_file(path: Path | None) -> dict[str, list[ProgramRule]]:
    """Return the rules by store. The rules under `*` apply to all other stores. If `path` is None, there are none.

    Raises:
        StartError: The file cannot be read, or has an invalid entry.
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
