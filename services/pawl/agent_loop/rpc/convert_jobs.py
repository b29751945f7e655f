"""Jobs that users start: requests to values of ours."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from pawl.agent.v1 import jobs_pb2
from pawl.agent_loop.domain import checks
from pawl.agent_loop.domain.assembly import ARGUMENTS_BYTES_MAX
from pawl.agent_loop.domain.background import AskedJob
from pawl.agent_loop.domain.condition import Condition
from pawl.agent_loop.domain.options import NAME_CHARACTERS_MAX
from pawl.agent_loop.domain.run import JobReports, Monitor
from pawl.agent_loop.rpc.convert import WIRE
from pawl.chassis.ids import check_agent_name, check_id
from pawl.chassis.labels import check_labels
from pawl.chassis.translate import Exceptions
from pawl.errors import InvalidField, TooLarge
from pawl.event.v1 import run_pb2

_REPORTS: Final = WIRE.enum(JobReports, run_pb2.JobReports, field="reports")


def _reports(request: Any) -> JobReports | None:
    return _REPORTS.read(request.reports) if request.reports else None


WIRE.struct(Condition, run_pb2.JobCondition)
WIRE.struct(Monitor, run_pb2.JobMonitor)
_ASKED: Final = WIRE.struct(
    AskedJob,
    jobs_pb2.StartJobRequest,
    Exceptions(of_message=("request_id",), read={"reports": _reports}, unwritten=("reports",)),
)


def asked(request: jobs_pb2.StartJobRequest) -> tuple[AskedJob, bytes]:
    """Return the job that is asked for, and what tells it from others.

    Raises:
        InvalidField, InvalidId, TooLarge
    """
    check_id(request.conversation_id, "conversation_id", optional=True)
    check_agent_name(request.agent, "agent", optional=True)
    checks.conversation_key(request.conversation_key)
    check_labels(request.labels)
    if not request.tool_name or len(request.tool_name) > NAME_CHARACTERS_MAX or not request.tool_name.isprintable():
        raise InvalidField("a tool's name is printable, 1 to 256 characters", field="tool_name")
    if len(request.arguments_json) > ARGUMENTS_BYTES_MAX:
        raise TooLarge(f"arguments_json may have at most {ARGUMENTS_BYTES_MAX} bytes", field="arguments_json")
    try:
        request.arguments_json.decode()
    except UnicodeDecodeError:
        raise InvalidField("arguments_json is JSON, in UTF-8", field="arguments_json") from None
    copy = jobs_pb2.StartJobRequest()
    copy.CopyFrom(request)
    copy.ClearField("request_id")
    return _ASKED.read(request), hashlib.sha256(copy.SerializeToString(deterministic=True)).digest()
