"""Events of API keys: who made and revoked which, and logins that failed."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Final

import msgspec

from pawl.chassis.ids import KeyId, StoreId, is_id
from pawl.chassis.login_failures import NO_KEY, FailureReport, FailureSum
from pawl.errors import InvalidField
from pawl.job_store.domain.keys import DEPLOYMENT_STORE, Governor, Key, governed_store

_SOURCE_LENGTH_MAX: Final = 64


class KeyEventKind(StrEnum):
    """The kinds of events."""

    KEY_CREATED = "KEY_CREATED"
    KEY_REVOKED = "KEY_REVOKED"
    KEY_BOOTSTRAPPED = "KEY_BOOTSTRAPPED"
    LOGINS_FAILED = "LOGINS_FAILED"


class KeyEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a key, as that was then, or logins that failed. Its id is given when it is kept."""

    event_id: int = 0
    time: datetime
    kind: KeyEventKind
    store_id: StoreId = DEPLOYMENT_STORE
    key_id: KeyId = NO_KEY
    key_name: str = ""
    user_id: str = ""
    roles: frozenset[str] = frozenset()
    by_store_id: StoreId = DEPLOYMENT_STORE
    by_user_id: str = ""
    by_delegate_user_id: str = ""
    by_credential_id: str = ""
    service: str = ""
    failures: FailureSum | None = None


def event_of(kind: KeyEventKind, key: Key, *, time: datetime, governor: Governor | None = None) -> KeyEvent:
    """Return that a governor, None for who has access to the database, did something to a key."""
    event = KeyEvent(
        time=time,
        kind=kind,
        store_id=key.store_id,
        key_id=key.key_id,
        key_name=key.name,
        user_id=key.user_id,
        roles=key.roles,
    )
    if governor is None:
        return event
    return msgspec.structs.replace(
        event,
        by_store_id=governor.store_id,
        by_user_id=governor.user_id,
        by_delegate_user_id=governor.delegate_user_id,
        by_credential_id=governor.credential_id,
    )


def failed(service: str, report: FailureReport, *, time: datetime) -> KeyEvent:
    """Return that logins failed at a service; the key of the report is named by its id alone.

    Raises:
        InvalidField: nothing of ours makes such a report.
    """
    ids_are_good = is_id(report.report_id) and (not report.key_id or is_id(report.key_id))
    source = report.sum.source
    if not ids_are_good or len(source) > _SOURCE_LENGTH_MAX or not source.isprintable() or report.sum.count < 1:
        raise InvalidField("failure_reports: ids, a source and a count", field="failure_reports")
    return KeyEvent(
        time=time,
        kind=KeyEventKind.LOGINS_FAILED,
        key_id=report.key_id,
        service=service,
        failures=report.sum,
    )


def visible_store(governor: Governor, named: str) -> StoreId | None:
    """Return the store whose events are meant, None for all: none named is the governor's own, of the deployment all.

    Raises:
        PermissionDenied: it is another one's.
        InvalidId: it cannot exist.
    """
    return None if governor.is_deployment and not named else governed_store(governor, named)
