"""Adding programs where any may be started: by whoever owns the machine. OPS-1."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.chassis.auth import Principal, local_principal, set_principal, user_principal
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.errors import PermissionDenied
from pawl.tool.v1 import source_pb2 as pb
from pawl.tool_registry.rpc.source_servicer import SourceServicer

OPERATOR = user_principal(
    StoreId("local"), UserId("olga"), frozenset({"operator", "admin"}), credential_id=CredentialId("key_1")
)
PROGRAM = pb.SourceConfig(name="mine", mcp_stdio=pb.McpStdioConfig(command=["id"]))
WEB = pb.SourceConfig(name="web", mcp_http=pb.McpHttpConfig(url="https://example.com/"))


class Asked(Exception):
    """The use case was reached."""


class Sources:
    async def add(self, *_: Any, **__: Any) -> None:
        raise Asked


async def add(who: Principal, config: pb.SourceConfig, *, is_ones_own: bool = True) -> None:
    set_principal(who)
    sources: Any = Sources()
    nothing: Any = None
    await SourceServicer(sources, is_ones_own=is_ones_own).AddSource(pb.AddSourceRequest(config=config), nothing)


async def test_where_any_program_may_be_started_the_key_of_another_adds_none() -> None:
    with pytest.raises(PermissionDenied, match="PAWL_MCP_PROGRAMS_FILE"):
        await add(OPERATOR, PROGRAM)


async def test_the_local_key_adds_any_program_and_others_what_is_no_program_or_is_listed() -> None:
    owner = local_principal({})
    for who, config, is_ones_own in ((owner, PROGRAM, True), (OPERATOR, WEB, True), (OPERATOR, PROGRAM, False)):
        with pytest.raises(Asked):
            await add(who, config, is_ones_own=is_ones_own)
