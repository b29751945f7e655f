"""Frames of a Session: from the contract to ours and back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final, cast

from pawl.agent.v1 import session_pb2, types_pb2
from pawl.agent_loop.app import frames
from pawl.agent_loop.domain.options import NAME_CHARACTERS_MAX
from pawl.agent_loop.rpc import convert
from pawl.chassis.ids import check_id
from pawl.errors import InvalidField, PawlError
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2

CALLS_MAX: Final = 64
TOOLS_MAX: Final = 1000
VERSIONS_MAX: Final = 10_000
"""Versions of all tools of a client: each takes a hundred bytes for as long as its stream is open."""

_FRAME_ID_CHARACTERS_MAX: Final = 64

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
    match request.WhichOneof("frame"):
        case "hello":
            return _hello(request.hello)
        case "start":
            conversation_id = check_id(request.start.conversation_id, "start.conversation_id", optional=True)
            return frames.Start(message=convert.message(request.start, conversation_id))
        case "attach":
            return frames.Attach(
                run_id=check_id(request.attach.run_id, "attach.run_id"),
                after_seq=convert.seq(request.attach.after_seq, "attach.after_seq"),
            )
        case "detach":
            return frames.Detach(run_id=check_id(request.detach.run_id, "detach.run_id"))
        case "tool_result":
            return convert.tool_result(request.tool_result)
        case "tool_progress":
            return _progress(request.tool_progress)
        case "decision":
            return convert.decision(request.decision)
        case "message":
            conversation_id = check_id(request.message.conversation_id, "message.conversation_id")
            return convert.message(request.message, conversation_id)
        case "cancel":
            return frames.Cancel(run_id=check_id(request.cancel.run_id, "cancel.run_id"), reason=request.cancel.reason)
        case "heartbeat":
            return frames.ClientHeartbeat()
        case _:
            raise InvalidField("the frame is empty, or of a kind that this version does not know", field="frame")


def _hello(hello: session_pb2.Hello) -> frames.Hello:
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
    return frames.Hello(
        client_id=check_id(hello.client_id, "hello.client_id", optional=True),
        tools=tuple(frames.ClientTool(name=tool.name, versions=frozenset(tool.versions)) for tool in hello.tools),
        calls_max=hello.calls_max,
    )


def _progress(progress: session_pb2.ToolProgressReport) -> frames.ToolProgress:
    return frames.ToolProgress(
        run_id=check_id(progress.run_id, "tool_progress.run_id"),
        call_id=check_id(progress.call_id, "tool_progress.call_id"),
        offer_epoch=progress.offer_epoch,
        fraction=progress.fraction if progress.HasField("fraction") else None,
        message=progress.message,
    )


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
