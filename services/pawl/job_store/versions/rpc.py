"""Converts versions to messages for the servicers of each kind of definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from google.protobuf.message import Message

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import check_id
from pawl.errors import NotFound
from pawl.job_store.ledger.pages import Small, next_token, page_size, read_token
from pawl.job_store.ledger.rpc.messages import timestamp
from pawl.job_store.versions.rules import VersionRow
from pawl.job_store.versions.store import PostgresVersions

M = TypeVar("M", bound=Message)

VERSION_MAX: Final = 2**31 - 1


class _VersionsRequest(Protocol):
    name: str
    page_size: int
    page_token: str


def message_of(row: VersionRow, kind: type[M]) -> M:
    """Return the version that `content` encodes, including the fields that the row adds."""
    message: Any = kind.FromString(row.content)
    message.version = row.version
    message.create_time.CopyFrom(timestamp(row.create_time))
    message.create_user_id = row.create_user_id
    return message  # type: ignore[no-any-return]  # of this kind


async def versions_for(
    user: Principal,
    versions: PostgresVersions,
    request: _VersionsRequest,
    *,
    method: str,
    read: Callable[[VersionRow], M | None],
    not_found: type[NotFound],
) -> tuple[Sequence[M], str]:
    """Return a page of a definition's versions, newest first, and the token of the next page.

    `read` returns a version's message, or None if the user may not see this version. Users who may not see the newest
    version may not see any version.

    Raises:
        not_found: The user may not see any version.
        InvalidPageToken
    """
    name = check_id(request.name, "name")
    selection = (user.store_id, name)
    before = read_token(request.page_token, method, selection, Small)
    page = await versions.versions(
        user.store_id, name, before=VERSION_MAX if before is None else before, rows_max=page_size(request.page_size)
    )
    newest = await versions.get(user.store_id, name, 0)
    shown = [message for row in page.rows if (message := read(row)) is not None]
    if (newest is not None and read(newest) is None) or not (shown or request.page_token):
        raise not_found
    return shown, next_token(method, selection, page, lambda row: row.version)
