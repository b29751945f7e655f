from __future__ import annotations

from typing import Final

from pawl.agent.v1 import session_pb2
from pawl.agent_loop.api.messages import definitions
from pawl.agent_loop.loop.rules import checks
from pawl.agent_loop.loop.rules.options import NAME_CHARACTERS_MAX
from pawl.chassis.ids import check_id
from pawl.chassis.rpc.translate import kinds_of
from pawl.errors import InvalidField

CALLS_MAX: Final = 64
TOOLS_MAX: Final = 1000
# Maximum total number of tool versions per client. Each takes about 100 bytes while the stream is open.
VERSIONS_MAX: Final = 10_000

# Id fields by kind of frame.
_IDS: Final = {
    kind: [name for name in field.message_type.fields_by_name if name.endswith("_id")]
    for kind, field in kinds_of(session_pb2.SessionRequest, "frame").items()
}


def check(frame: session_pb2.SessionRequest) -> None:
    """Validate the frame.

    Raises:
        InvalidField, InvalidId, TooLarge: The frame is invalid. The receipt reports this error.
    """
    kind = frame.WhichOneof("frame")
    if kind is None:
        raise InvalidField("the frame is empty or of an unknown kind", field="frame")
    if kind == "heartbeat":
        return
    if kind == "hello":
        _check_hello(frame.hello)
    for name in _IDS[kind]:
        check_id(getattr(getattr(frame, kind), name), f"{kind}.{name}", optional=kind in {"hello", "start"})
    if kind == "attach":
        checks.seq(frame.attach.after_seq, "attach.after_seq")
    check_id(frame.frame_id, "frame_id")


def _check_hello(hello: session_pb2.Hello) -> None:
    if hello.calls_max > CALLS_MAX:
        raise InvalidField(f"calls_max must be at most {CALLS_MAX}", field="hello.calls_max")
    if len(hello.tools) > TOOLS_MAX:
        raise InvalidField(f"tools must have at most {TOOLS_MAX} entries", field="hello.tools")
    for tool in hello.tools:
        if not 1 <= len(tool.name) <= NAME_CHARACTERS_MAX:
            raise InvalidField(f"a tool name must have 1 to {NAME_CHARACTERS_MAX} characters", field="hello.tools.name")
    if sum(len(tool.versions) for tool in hello.tools) > VERSIONS_MAX:
        raise InvalidField(f"tools must have at most {VERSIONS_MAX} versions in total", field="hello.tools.versions")
    checks.own_tools(definitions(hello.front_end_tools), "hello.front_end_tools")
