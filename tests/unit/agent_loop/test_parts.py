"""Messages with more than a text: what is taken, and what the model is told of it."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.domain import history, parts
from pawl.agent_loop.domain.limits import Limits
from pawl.agent_loop.domain.loop_state import NewerVersion
from pawl.agent_loop.domain.message import Message, Role
from pawl.agent_loop.domain.parts import FilePart, ImagePart, Part
from pawl.agent_loop.domain.run import Run, RunOptions
from pawl.agent_loop.domain.state import State
from pawl.chassis.ids import ConversationId, RunId, StoreId, UserId
from pawl.errors import InvalidField, PawlError, TooLarge
from pawl.event.v1 import message_pb2
from tests.fakes.images import IMAGES, PNG
from tests.fakes.provider import check_history

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=40)


def image(data: bytes = PNG, media_type: str = "") -> Part:
    return Part(image=ImagePart(data=data, media_type=media_type))


def file(text: str = "Water the plants.", name: str = "handbook.md") -> Part:
    return Part(file=parts.with_text(FilePart(document_name=name), text))


PARTS = st.lists(
    st.one_of(
        TEXTS.map(lambda text: Part(text=text)),
        st.sampled_from(list(IMAGES.values())).map(image),
        TEXTS.map(file),
    ),
    max_size=6,
)


def taken(text: str, *given_: Part, takes_images: bool = True) -> tuple[Part, ...]:
    """The parts of a message as the ledger has them."""
    checked = parts.checked(text, given_, takes_images=takes_images)
    filled = [
        Part(file=parts.with_text(part.file, given_part.file.text))
        if part.file is not None and given_part.file is not None
        else part
        for part, given_part in zip(checked, [*([Part(text=text)] if text else []), *given_], strict=True)
    ]
    return parts.within(filled)


def state_of(*messages: Message, limits: Limits | None = None) -> State:
    run = Run(
        store_id=StoreId("s"),
        user_id=UserId("u"),
        conversation_id=ConversationId("c"),
        run_id=RunId("r"),
        options=RunOptions(limits=limits or Limits()),
    )
    return State(run=run, messages=messages)


def said(*content: Part, number: int = 0) -> Message:
    return Message(role=Role.USER, run_id=RunId("r"), parts=content, number=number)


@pytest.mark.parametrize("kind", IMAGES)
def test_the_type_of_an_image_is_seen_in_it(kind: str) -> None:
    (part,) = parts.checked("", [image(IMAGES[kind])], takes_images=True)
    assert part.image is not None
    assert (part.image.media_type, part.image.size_bytes, len(part.image.sha256)) == (kind, len(IMAGES[kind]), 64)


@pytest.mark.parametrize(
    ("text", "given_parts", "error"),
    [
        ("", [Part()], InvalidField),
        ("bell\a", [Part(text="a")], InvalidField),
        ("", [Part(text="bell\a")], InvalidField),
        ("", [Part(text="")], InvalidField),
        ("", [image(b"")], InvalidField),
        ("", [image(b"<svg>")], InvalidField),
        ("", [image(PNG[:-1])], InvalidField),
        ("", [image(media_type="image/gif")], InvalidField),
        ("", [image(PNG + bytes(1024 * 1024))], TooLarge),
        ("", [image(PNG + bytes(600_000))] * 2, TooLarge),
        ("x" * 200_000, [Part(text="x" * 100_000)], TooLarge),
        ("", [Part(text="a")] * 33, InvalidField),
        ("", [Part(file=FilePart(document_name=""))], InvalidField),
        ("", [Part(file=FilePart(document_name="x" * 201))], InvalidField),
    ],
)
def test_a_part_that_cannot_be_meant_is_refused(text: str, given_parts: list[Part], error: type[PawlError]) -> None:
    with pytest.raises(error):
        parts.checked(text, given_parts, takes_images=True)


def test_what_a_client_says_of_a_document_s_text_is_not_believed() -> None:
    (part,) = parts.checked("", [file("Do not water the plants.")], takes_images=False)
    assert part.file == FilePart(document_name="handbook.md")


@given(TEXTS, PARTS, st.booleans())
def test_the_model_is_told_every_part_in_order(text: str, given_parts: list[Part], takes_images: bool) -> None:
    """In the form of the protocol; texts only where there is nothing else."""
    whole = taken(text, *given_parts)
    (message,) = history.of_run(state_of(said(*whole)), takes_images=takes_images)
    check_history([message])
    content = message["content"]
    shown = [part.image for part in whole if part.image is not None]
    assert isinstance(content, str) == (not shown or not takes_images)
    told: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    urls = [each["image_url"]["url"] for each in told if each["type"] == "image_url"]
    if takes_images:
        assert urls == [f"data:{one.media_type};base64,{base64.b64encode(one.data).decode()}" for one in shown]
    else:
        assert not urls
    texts = "\n".join(each["text"] for each in told if each["type"] == "text")
    place = 0
    for part in whole:
        words = part.text if part.text is not None else part.file.text if part.file is not None else ""
        place = texts.index(words, place) + len(words)
    assert texts.count("this model takes no images") >= (0 if takes_images else len(shown))


@given(st.lists(st.one_of(TEXTS, PARTS.filter(bool)), min_size=1, max_size=5))
def test_neighbours_are_one_message_with_all_that_they_say(messages: list[Any]) -> None:
    own = [
        Message(role=Role.USER, run_id=RunId("r"), text=each) if isinstance(each, str) else said(*taken("", *each))
        for each in messages
    ]
    (message,) = history.of_run(state_of(*own))
    check_history([message])
    content = message["content"]
    images = sum(part.image is not None for one in own for part in one.parts)
    assert sum(part["type"] == "image_url" for part in content if isinstance(part, dict)) == images


def test_an_image_counts_for_what_a_model_reads_of_it_and_not_for_its_bytes() -> None:
    large = taken("", image(PNG + bytes(900_000)))
    earlier = Message(role=Role.USER, run_id=RunId("r"), text="x" * 3000, number=1)
    state = state_of(earlier, said(*large, number=2), limits=Limits(context_bytes_max=10_000))
    assert history.summarise_to(state) == 0
    (told,) = history.of_run(state_of(said(*large)))
    assert parts.IMAGE_SIZE_BYTES < history.size_bytes(told) < 2 * parts.IMAGE_SIZE_BYTES


def test_a_summary_is_written_of_words() -> None:
    state = state_of(said(*taken("What is this?", image(PNG + bytes(5000))), number=1))
    summarised = history.to_summarise(state, 1)
    assert "What is this?" in summarised
    assert f"An image was here (image/png, {len(PNG) + 5000} bytes)" in summarised
    assert "base64" not in summarised


@given(PARTS)
def test_parts_go_over_the_wire_and_back(given_parts: list[Part]) -> None:
    message = said(*taken("hello", *given_parts))
    body = wire.MESSAGE.write(message).SerializeToString()
    assert wire.MESSAGE.read(message_pb2.Message.FromString(body)).parts == message.parts


def test_a_role_that_is_unknown_leaves_the_run_to_a_newer_version() -> None:
    """I23: so does a worker of the version before with a message in parts."""
    with pytest.raises(NewerVersion, match="77"):
        wire.MESSAGE.read(message_pb2.Message(role=77))  # type: ignore[arg-type]  # of a newer version


def test_a_part_of_a_newer_kind_is_refused_and_not_dropped() -> None:
    unknown = message_pb2.Part.FromString(b"\xa2\x06\x01x")
    with pytest.raises(InvalidField, match="a part is"):
        parts.checked("", [wire.WIRE.struct(Part, message_pb2.Part).read(unknown)], takes_images=True)
    assert msgspec.json.encode(parts.content([Part(text="a")], takes_images=True)) == b'"a"'
