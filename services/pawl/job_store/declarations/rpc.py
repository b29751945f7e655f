"""Servicer for pawl.agent.v1.DeclarationService, which agent-loop forwards."""

from __future__ import annotations

from typing import Final

from pawl.agent.v1 import declaration_pb2 as pb
from pawl.chassis.identity.auth import Principal, require_user
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import check_id
from pawl.chassis.rpc.kinds import Context
from pawl.errors import Conflict, InvalidField, PermissionDenied
from pawl.job_store.declarations.store import PostgresDeclarations

_OF_STORE: Final = frozenset({"agent", "source", "rule", "settings", "workflow"})
_OF_USER: Final = frozenset({"schedule", "trigger", "channel"})
_NAME_CHARACTERS_MAX: Final = 200
_LEASE_SECONDS_MAX: Final = 60


class DeclarationServicer:
    def __init__(self, declarations: PostgresDeclarations) -> None:
        self._declarations = declarations

    async def ListDeclarations(
        self, request: pb.ListDeclarationsRequest, context: Context
    ) -> pb.ListDeclarationsResponse:
        user = require_user()
        return pb.ListDeclarationsResponse(declarations=await self._declarations.list(user.store_id, user.user_id))

    async def PutDeclaration(self, request: pb.PutDeclarationRequest, context: Context) -> pb.PutDeclarationResponse:
        user, requested = require_user(), request.declaration
        owner_id = _owner_id(user, requested)
        check_id(requested.set, "declaration.set")
        stored = await self._declarations.put(user.store_id, owner_id, requested, user.user_id)
        return pb.PutDeclarationResponse(declaration=stored)

    async def DeleteDeclaration(
        self, request: pb.DeleteDeclarationRequest, context: Context
    ) -> pb.DeleteDeclarationResponse:
        user = require_user()
        await self._declarations.delete(user.store_id, _owner_id(user, request.declaration), request.declaration)
        return pb.DeleteDeclarationResponse()

    async def LeaseSet(self, request: pb.LeaseSetRequest, context: Context) -> pb.LeaseSetResponse:
        user, name, holder_id = require_user(), check_id(request.set, "set"), check_id(request.holder_id, "holder_id")
        if request.lease_seconds > _LEASE_SECONDS_MAX:
            raise InvalidField(
                f"lease_seconds must be at most {_LEASE_SECONDS_MAX}, got {request.lease_seconds}",
                field="lease_seconds",
            )
        if not await self._declarations.lease(user.store_id, user.user_id, name, holder_id, request.lease_seconds):
            raise Conflict(f"another process is applying the set {name!r}: try again later", name=name)
        return pb.LeaseSetResponse()


def _owner_id(user: Principal, requested: pb.Declaration) -> str:
    """Return the owner of a private declaration, or an empty string if the declaration belongs to the store.

    Raises:
        InvalidField: The kind, name or version is invalid.
        PermissionDenied: The declaration belongs to the store, and the caller is not an admin.
    """
    if requested.kind not in _OF_STORE | _OF_USER:
        kinds = ", ".join(sorted(_OF_STORE | _OF_USER))
        raise InvalidField(f"declaration.kind must be one of {kinds}, got {requested.kind!r}", field="declaration.kind")
    if not 0 < len(requested.name) <= _NAME_CHARACTERS_MAX or not requested.name.isprintable():
        raise InvalidField(
            f"declaration.name must be 1 to {_NAME_CHARACTERS_MAX} printable characters", field="declaration.name"
        )
    if requested.version >= 1 << 63:
        raise InvalidField("declaration.version must be less than 2^63", field="declaration.version")
    if requested.kind in _OF_USER:
        return user.user_id
    if Role.ADMIN not in user.roles:
        raise PermissionDenied(f"declaring a {requested.kind} requires the admin role")
    return ""
