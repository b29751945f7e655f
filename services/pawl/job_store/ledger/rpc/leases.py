"""Reads the leases that workers and clients ask for."""

from __future__ import annotations

from typing import Final

from pawl.chassis.ids import WorkerId, check_id
from pawl.errors import InvalidField
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.rules.slots import FreeDrive

LEASE_SECONDS_MIN: Final = 1.0
LEASE_SECONDS_MAX: Final = 300.0


def free_drive(request: ledger_pb2.SubmitMessageRequest) -> FreeDrive | None:
    if not request.HasField("drive"):
        return None
    worker_id = WorkerId(check_id(request.drive.worker_id, "drive.worker_id"))
    return FreeDrive(worker_id=worker_id, lease_seconds=lease_seconds(request.drive.lease_seconds))


def lease_seconds(asked: float) -> float:
    """Return a valid lease duration, or raise InvalidField."""
    if not LEASE_SECONDS_MIN <= asked <= LEASE_SECONDS_MAX:
        raise InvalidField(f"lease_seconds must be between 1 and 300, got {asked:g}", field="lease_seconds")
    return asked
