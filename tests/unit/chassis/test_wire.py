"""Errors as gRPC statuses, and structs as protobuf messages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum, IntEnum, StrEnum
from typing import Any, NewType

import grpc
import msgspec
import pytest
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # no py.typed
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.rpc import status
from pawl.chassis.rpc.translate import Exceptions, Translator, Unknown
from pawl.errors import (
    DependencyUnavailable,
    InvalidField,
    NotFound,
    Overloaded,
    PawlError,
    TooLarge,
    by_kind,
    by_reason,
)
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.notify.v1 import notify_pb2
from pawl.tool.v1 import execution_pb2
from tests.tables import not_explained


class Context:
    def __init__(self) -> None:
        self.error: grpc.aio.AioRpcError | None = None

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("pawl-request-id", "req_1"),)

    async def abort(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str | bytes], ...]) -> None:
        self.error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


async def carry(error: PawlError) -> grpc.aio.AioRpcError:
    context: Any = Context()
    abort: Any = status.abort
    await abort(context, error)
    assert isinstance(context.error, grpc.aio.AioRpcError)
    return context.error


def bare(code: grpc.StatusCode, details: str = "") -> PawlError:
    return status.from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details))


async def test_every_error_survives_the_wire() -> None:
    assert set(status.CODES) == set(by_kind)
    for reason, error in by_reason.items():
        sent = error("what to do", field="name", got=-1)
        carried = await carry(sent)
        assert carried.code().name == sent.kind.value
        got = status.from_rpc_error(carried)
        metadata = {"field": "name", "got": "-1"}
        assert (type(got), got.message, got.reason, got.metadata) == (type(sent), "what to do", reason, metadata)
        assert (carried.trailing_metadata() or {})["pawl-request-id"] == "req_1"


@given(st.text(max_size=5000), st.dictionaries(st.sampled_from(["field", "x"]), st.text(max_size=2000)))
async def test_a_long_message_still_fits_in_a_trailer(message: str, metadata: dict[str, str]) -> None:
    """Clients drop a response whose headers are over 8 KiB."""
    carried = await carry(InvalidField(message, **metadata))
    details = (carried.trailing_metadata() or {})["grpc-status-details-bin"]
    assert len((carried.details() or "").encode()) * 3 + len(details) * 4 / 3 < 7500
    assert type(status.from_rpc_error(carried)) is InvalidField


async def test_an_unknown_reason_keeps_its_kind_and_name() -> None:
    """I23: a newer service may have sent the error."""
    got = status.from_rpc_error(await carry(NotFound.restore("gone", "GOAT_NOT_FOUND", {"goat": "billy"})))
    assert (type(got), got.reason, got.metadata) == (NotFound, "GOAT_NOT_FOUND", {"goat": "billy"})


def test_errors_from_grpc_itself_are_mapped_without_their_text() -> None:
    """The deadline of a call to a peer does not belong to the original call."""
    assert {isinstance(bare(code), PawlError) for code in grpc.StatusCode if code is not grpc.StatusCode.OK} == {True}
    unhealthy = "ipv4:127.0.0.1:42127: backend unhealthy"
    rows: list[tuple[PawlError, type[PawlError]]] = [
        (bare(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)"), TooLarge),
        (bare(grpc.StatusCode.RESOURCE_EXHAUSTED), Overloaded),
        (bare(grpc.StatusCode.UNAVAILABLE, unhealthy), DependencyUnavailable),
        (bare(grpc.StatusCode.INTERNAL, unhealthy), DependencyUnavailable),
        (bare(grpc.StatusCode.UNKNOWN, unhealthy), DependencyUnavailable),
        (status.of_peer(bare(grpc.StatusCode.DEADLINE_EXCEEDED)), DependencyUnavailable),
        (status.of_peer(NotFound()), NotFound),
    ]
    assert [(type(error), "127.0.0.1" in error.message) for error, _ in rows] == [(kind, False) for _, kind in rows]


def test_error_details_from_another_domain_are_ignored() -> None:
    info = error_details_pb2.ErrorInfo(reason="RUN_NOT_FOUND", domain="elsewhere.example")
    wire = status_pb2.Status(code=5)
    wire.details.add().Pack(info)
    for details in (wire.SerializeToString(), b"\xff\xff"):
        trailing = grpc.aio.Metadata(("grpc-status-details-bin", details))
        error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailing)
        assert type(status.from_rpc_error(error)) is NotFound


RunId = NewType("RunId", str)


class Kind(StrEnum):
    CLARIFICATION = "CLARIFICATION"
    PERMISSION = "PERMISSION"
    CONFIRMATION = "CONFIRMATION"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    question: str
    why: str = ""
    kind: Kind = Kind.CLARIFICATION
    options: tuple[str, ...] = ()
    default_answer: str = ""
    timeout_seconds: float = 0.0
    answer_schema: bytes = b""


class Above(msgspec.Struct, frozen=True, kw_only=True):
    run_id: RunId
    conversation_id: str
    agent_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    store_id: str
    run_id: RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    location: Location
    epoch: int


def refuse(unknown: Unknown) -> ValueError:
    return ValueError(f"{unknown.field} {unknown.value} {unknown.number}")


def only(message: type[Message], *names: str) -> Exceptions:
    """Translate only these fields of a message."""
    return Exceptions(of_message=set(message.DESCRIPTOR.fields_by_name) - {*names})


STRICT = Translator(refuse)


def struct(name: str, **fields: Any) -> Any:
    """Return a struct class with these fields. Each is a type or a (type, default) pair."""
    made = [(field, *kind) if isinstance(kind, tuple) else (field, kind) for field, kind in fields.items()]
    return msgspec.defstruct(name, made, frozen=True, kw_only=True)


Verdict = struct("Verdict", call_id=str, question=(Question | None, None))
Resolve = struct("Resolve", tool_names=list[str], pinned_versions=dict[str, int])
Lease = struct("Lease", client_id=str, offer_epoch=int, expire_time=float)
Note = struct("Note", create_time=datetime, read_time=(datetime | None, None))
Created = struct("Created", create_time=datetime)
Progress = struct("Progress", fraction=(float | None, None), message=(str, ""), has_checkpoint=(bool, False))
Limits = struct("Limits", rounds_max=(int, 10), agent_depth_max=(int, 2))
Warned = struct("Warned", reason=str, message=str)
ToppedUp = struct("ToppedUp", tokens=int, token_budget=int, user_id=str)
More = struct("More", run_id=str, conversation_id=str, agent_name=str, depth=(int, 4))


def test_a_written_message_reads_back_the_same() -> None:
    question = Question(question="which?", kind=Kind.PERMISSION, options=("a", "b"), answer_schema=b"{}")
    translation = STRICT.struct(Question, call_pb2.Question)
    message = translation.write(question)
    assert (message.kind, message.answer_schema_json) == (call_pb2.QUESTION_KIND_PERMISSION, b"{}")
    assert translation.read(message) == question
    assert call_pb2.Question(**translation.fields(question)) == message


def test_optional_and_repeated_structs_and_sets_are_translated() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Context:
        store_id: str
        above: tuple[Above, ...] = ()
        user_roles: frozenset[str] = frozenset()

    fields = only(execution_pb2.CallContext, "store_id", "above", "user_roles")
    contexts = STRICT.struct(Context, execution_pb2.CallContext, fields)
    context = Context(
        store_id="s", above=(Above(run_id=RunId("r"), conversation_id="c"),), user_roles=frozenset({"b", "a"})
    )
    assert (list(contexts.write(context).user_roles), contexts.read(contexts.write(context))) == (["a", "b"], context)

    verdicts = STRICT.struct(Verdict, execution_pb2.Verdict, only(execution_pb2.Verdict, "call_id", "question"))
    for verdict in (Verdict(call_id="a"), Verdict(call_id="a", question=Question(question=""))):
        message = verdicts.write(verdict)
        assert message.HasField("question") == (verdict.question is not None)
        assert verdicts.read(message) == verdict


def test_maps_and_flat_structs_are_translated() -> None:
    fields = only(execution_pb2.ResolveToolsRequest, "tool_names", "pinned_versions")
    resolves = STRICT.struct(Resolve, execution_pb2.ResolveToolsRequest, fields)
    resolve = Resolve(tool_names=["x"], pinned_versions={"x": 3})
    assert resolves.read(resolves.write(resolve)) == resolve

    claims = STRICT.struct(Claim, ledger_pb2.ReportCrashRequest)
    claim = Claim(location=Location(store_id="s", run_id=RunId("r")), epoch=7)
    assert claims.write(claim) == ledger_pb2.ReportCrashRequest(store_id="s", run_id="r", epoch=7)
    assert claims.read(claims.write(claim)) == claim


def test_times_are_seconds_or_datetimes_to_the_microsecond() -> None:
    leases = STRICT.struct(Lease, call_pb2.OfferLease)
    for time in (1_700_000_000.123456, 0.0, -1.5):
        message = leases.write(Lease(client_id="", offer_epoch=0, expire_time=time))
        expected = call_pb2.OfferLease()
        expected.expire_time.FromMicroseconds(round(time * 1e6))
        assert message == expected
        assert leases.read(message).expire_time == pytest.approx(time, abs=1e-6)

    fields = only(notify_pb2.Notification, "create_time", "read_time")
    notes = STRICT.struct(Note, notify_pb2.Notification, fields)
    note = Note(create_time=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC))
    assert (notes.read(notes.write(note)), notes.write(note).HasField("read_time")) == (note, False)


def test_a_time_outside_the_calendar_is_an_error() -> None:
    translator, fields = (
        Translator(lambda unknown: LookupError(unknown.field)),
        only(notify_pb2.Notification, "create_time"),
    )
    notes = translator.struct(Created, notify_pb2.Notification, fields, field="note")
    times = [Timestamp(seconds=2**62), Timestamp(nanos=-1), Timestamp(seconds=253402300800)]
    rows = [(time.SerializeToString(), r"^'note\.create_time'$|^note\.create_time$") for time in times]
    assert not_explained(LookupError, lambda time: notes.read(note_at(time)), rows) == []


def note_at(time: bytes) -> notify_pb2.Notification:
    return notify_pb2.Notification(create_time=Timestamp.FromString(time))


def test_absent_scalars_are_none_or_the_default() -> None:
    progress = STRICT.struct(Progress, execution_pb2.ExecutionProgress)
    for fraction in (None, 0.0):
        message = progress.write(Progress(fraction=fraction))
        assert (message.HasField("fraction"), progress.read(message).fraction) == (fraction is not None, fraction)

    limits = STRICT.struct(Limits, run_pb2.RunLimits, only(run_pb2.RunLimits, "rounds_max", "agent_depth_max"))
    read = limits.read(run_pb2.RunLimits(agent_depth_max=0, model_attempts_max=3))
    assert read == Limits(rounds_max=10, agent_depth_max=0)


def test_unspecified_enums_have_a_default_but_unknown_values_are_an_error() -> None:
    defaults: dict[type[Enum], Enum] = {Kind: Kind.CONFIRMATION}
    careful = Translator(refuse, defaults=defaults).struct(Question, call_pb2.Question, field="call.question")
    assert careful.read(call_pb2.Question()).kind is Kind.CONFIRMATION
    with pytest.raises(ValueError, match=r"call\.question\.kind QUESTION_KIND_99 99"):
        careful.read(call_pb2.Question.FromString(b"\x18\x63"))  # Field 3, the kind: 99.
    with pytest.raises(ValueError, match="QUESTION_KIND_0"):
        STRICT.struct(Question, call_pb2.Question).read(call_pb2.Question())


def test_oneof_fields_are_translated() -> None:
    kinds = {"warning": Warned, "run_topped_up": ToppedUp}
    without = {field.name for field in event_pb2.RunEvent.DESCRIPTOR.oneofs_by_name["kind"].fields} - set(kinds)
    events = STRICT.one_of(event_pb2.RunEvent, "kind", kinds, without=without)
    warned = Warned(reason="R", message="m")
    assert events.write(warned) == event_pb2.RunEvent(warning=event_pb2.Warning(reason="R", message="m"))
    assert events.read(events.write(warned)) == warned
    for message in (event_pb2.RunEvent(), event_pb2.RunEvent(round_started=event_pb2.RoundStarted())):
        with pytest.raises(ValueError, match="of kind"):
            events.read(message)
    with pytest.raises(TypeError, match="output_delta"):
        STRICT.one_of(event_pb2.RunEvent, "kind", kinds, without=without - {"output_delta"})


def test_a_field_missing_on_one_side_is_refused_unless_listed() -> None:
    listed = Exceptions(of_struct=("depth",))
    rows: list[tuple[Any, Any, Exceptions, str]] = [
        (struct("Short", tool_name=str, arguments=bytes), call_pb2.Inverse, Exceptions(), "summary is only in the m"),
        (More, run_pb2.RunAbove, Exceptions(), "depth is only in the struct"),
        (Above, run_pb2.RunAbove, listed, "the exception depth is not a field"),
    ]
    for cls, message, exceptions, says in rows:
        with pytest.raises(TypeError, match=says):
            STRICT.struct(cls, message, exceptions)
    assert STRICT.struct(More, run_pb2.RunAbove, listed).read(run_pb2.RunAbove()).depth == 4


def test_a_mismatched_type_is_refused() -> None:
    for hint in (int, bytes, float, bool, Kind, Above, tuple[str, ...]):
        with pytest.raises(TypeError, match="run_id is not"):
            STRICT.struct(struct("Wrong", run_id=hint, conversation_id=str), run_pb2.RunAbove)
    fields = only(execution_pb2.ResolveToolsRequest, "pinned_versions")
    with pytest.raises(TypeError, match="pinned_versions is a map"):
        STRICT.struct(struct("Wrong", pinned_versions=str), execution_pb2.ResolveToolsRequest, fields)


def test_differing_enums_are_refused() -> None:
    class Fewer(StrEnum):
        CLARIFICATION = "CLARIFICATION"
        PERMISSION = "PERMISSION"

    class Shifted(IntEnum):
        CLARIFICATION = 1
        PERMISSION = 3
        CONFIRMATION = 2

    fewer = STRICT.enum(Fewer, call_pb2.QuestionKind, without=("CONFIRMATION",))
    with pytest.raises(ValueError, match="QUESTION_KIND_3"):
        fewer.read(3)
    rows: list[tuple[Any, Any, str]] = [
        (Fewer, call_pb2.QuestionKind, "CONFIRMATION"),
        (Kind, call_pb2.DecisionKind, "CLARIFICATION"),
        (Shifted, call_pb2.QuestionKind, "PERMISSION"),
    ]
    for ours, theirs, says in rows:
        with pytest.raises(TypeError, match=says):
            STRICT.enum(ours, theirs)


def test_a_field_can_have_a_custom_translation() -> None:
    translation = STRICT.struct(
        Above,
        run_pb2.RunAbove,
        Exceptions(
            read={"run_id": lambda message: message.run_id.upper()},
            write={"run_id": lambda above: above.run_id.lower()},
            unwritten=("conversation_id",),
        ),
    )
    assert translation.read(run_pb2.RunAbove(run_id="r", conversation_id="c")) == Above(
        run_id=RunId("R"), conversation_id="c"
    )
    assert translation.write(Above(run_id=RunId("R"), conversation_id="c")) == run_pb2.RunAbove(run_id="r")
