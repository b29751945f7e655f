"""Frames of a Session: from the contract to ours and back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final, cast

from pawl.agent.v1 import session_pb2, types_pb2
from pawl.agent_loop.app import frames
from pawl.agent_loop.domain import checks
from pawl.agent_loop.domain.options import NAME_CHARACTERS_MAX
from pawl.agent_loop.rpc import convert
from pawl.chassis.ids import check_id
from pawl.chassis.translate import Exceptions, kinds_of
from pawl.errors import InvalidField, PawlError
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2

CALLS_MAX: Final = 64
TOOLS_MAX: Final = 1000
VERSIONS_MAX: Final = 10_000
"""Versions of all tools of a client: each takes a hundred bytes for as long as its stream is open."""

_FRAME_ID_CHARACTERS_MAX: Final = 64

# A message goes to a conversation that is there.
_LATER: Final = Exceptions(of_struct=("conversation_key", "front_end_tools"))
convert.WIRE.struct(frames.UserMessage, session_pb2.UserMessage, _LATER)
convert.WIRE.struct(frames.Hello, session_pb2.Hello, convert.BRINGS_TOOLS, field="hello")
convert.WIRE.struct(frames.Start, session_pb2.Start, convert.BRINGS_TOOLS)
_CONTENT: Final = convert.WIRE.one_of(
    session_pb2.SessionRequest,
    "frame",
    {
        "hello": frames.Hello,
        "start": frames.Start,
        "attach": frames.Attach,
        "detach": frames.Detach,
        "tool_result": frames.ToolResult,
        "tool_progress": frames.ToolProgress,
        "decision": frames.CallDecision,
        "message": frames.UserMessage,
        "cancel": frames.Cancel,
        "heartbeat": frames.ClientHeartbeat,
    },
)
_IDS: Final = {
    kind: [name for name in field.message_type.fields_by_name if name.endswith("_id")]
    for kind, field in kinds_of(session_pb2.SessionRequest, "frame").items()
}
"""The fields of each kind of frame that are ids."""
RECEIPT: Final = convert.WIRE.struct(frames.Receipt, types_pb2.Receipt)
_FRAMES: Final = convert.WIRE.one_of(
    session_pb2.SessionResponse,
    "frame",
    {
        "welcome": frames.Welcome,
        "offer_revoked": frames.OfferRevoked,
        "receipt": frames.Receipt,
        "end": frames.End,
        "heartbeat": frames.ServerHeartbeat,
    },
    without=("event", "gap", "offer"),  # Documents of the ledger.
)


async def client_frames(
    requests: AsyncIterator[session_pb2.SessionRequest],
) -> AsyncGenerator[frames.ClientFrame, None]:
    """Give the client's frames; one that is wrong carries the error that its receipt shall name."""
    async for request in requests:
        yield client_frame(request)


def client_frame(request: session_pb2.SessionRequest) -> frames.ClientFrame:
    """Return one frame of the client."""
    content: frames.Content | Exception
    try:
        content = _content(request)
        if not isinstance(content, frames.ClientHeartbeat):
            check_id(request.frame_id, "frame_id")
    except PawlError as error:
        content = error
    return frames.ClientFrame(frame_id=request.frame_id[:_FRAME_ID_CHARACTERS_MAX], content=content)


def _content(request: session_pb2.SessionRequest) -> frames.Content:
    kind = request.WhichOneof("frame")
    if kind is None:
        raise InvalidField("the frame is empty, or of a kind that this version does not know", field="frame")
    if kind == "hello":
        _check_hello(request.hello)
    for name in _IDS[kind]:
        check_id(getattr(getattr(request, kind), name), f"{kind}.{name}", optional=kind in {"hello", "start"})
    if kind == "attach":
        convert.seq(request.attach.after_seq, "attach.after_seq")
    content: frames.Content = _CONTENT.read(request)
    return content


def _check_hello(hello: session_pb2.Hello) -> None:
    if hello.calls_max > CALLS_MAX:
        raise InvalidField(f"calls_max may be at most {CALLS_MAX}", field="hello.calls_max")
    if len(hello.tools) > TOOLS_MAX:
        raise InvalidField(f"at most {TOOLS_MAX} tools", field="hello.tools")
    for tool in hello.tools:
        if not 1 <= len(tool.name) <= NAME_CHARACTERS_MAX:
            raise InvalidField(
                f"the name of a tool has 1 to {NAME_CHARACTERS_MAX} characters", field="hello.tools.name"
            )
    if sum(len(tool.versions) for tool in hello.tools) > VERSIONS_MAX:
        raise InvalidField(f"at most {VERSIONS_MAX} versions of all tools", field="hello.tools.versions")
    checks.own_tools(convert.definitions(hello), "hello.front_end_tools")


def server_frame(frame: frames.ServerFrame) -> session_pb2.SessionResponse:
    """Return a frame as the contract words it."""
    match frame:
        case frames.Event():
            return session_pb2.SessionResponse(event=cast("event_pb2.RunEvent", frame.event.document))
        case frames.Gap():
            return session_pb2.SessionResponse(gap=cast("gap_pb2.Gap", frame.gap.document))
        case frames.Offer():
            call = cast("call_pb2.Call", frame.call.document)
            return session_pb2.SessionResponse(
                offer=session_pb2.Offer(
                    call=call, offer_epoch=call.offer.offer_epoch, expire_time=call.offer.expire_time
                )
            )
        case _:
            return _FRAMES.write(frame)
