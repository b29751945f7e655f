"""Converts the requests with which users start jobs."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from functools import partial

from msgspec.structs import asdict

from pawl.chassis.ids import ConversationId, RunId, check_id
from pawl.errors import InvalidField
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.ports import LimitsOf
from pawl.job_store.ledger.rpc import operations
from pawl.job_store.ledger.rules.start_job import StartJob


def start(request: ledger_pb2.StartJobRequest, limits_of: LimitsOf) -> StartJob:
    if not (request.HasField("job") or request.message.only_repeat):
        raise InvalidField("job is required", field="job")
    submitted = operations.submit(request.message, limits_of)
    changes = {
        # A job calls no model.
        "refused_model": "",
        "fingerprint": hashlib.sha256(submitted.fingerprint + request.asked_sha256).digest(),
        "store_slots": limits_of(submitted.store_id).slots.background_per_store,
        "new_conversation_id": ConversationId(
            check_id(request.new_conversation_id, "new_conversation_id", optional=True)
        ),
    }
    return StartJob(
        **asdict(submitted) | changes,
        run_id=RunId(check_id(request.run_id, "run_id")),
        job=partial(_started, request.job),
        is_silent=request.job.reports == run_pb2.JOB_REPORTS_NONE,
    )


def _started(job: run_pb2.Job, now: datetime) -> bytes:
    """Return the job with its start time moved to `now`, the database's time. Its duration stays the same.

    The result is an encoded Run that can be appended to another. In protobuf, concatenated encodings merge into one
    message.
    """
    started = run_pb2.Job()
    started.CopyFrom(job)
    started.begin_time.FromDatetime(now)
    if job.HasField("end_time"):
        begin_time = job.begin_time.ToDatetime(tzinfo=UTC)
        started.end_time.FromDatetime(now + (job.end_time.ToDatetime(tzinfo=UTC) - begin_time))
    return run_pb2.Run(job=started).SerializeToString()
