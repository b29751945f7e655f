"""Forks of conversations: fork points, and paths to inherited messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.ids import CallId, ConversationId
from pawl.errors import ConversationNotFound, PastTooLong, RequestIdReused
from pawl.job_store.ledger.rules.forks import (
    SEGMENTS_MAX,
    ForkConversation,
    Head,
    fork_points,
    is_whole,
    open_point,
    path_to,
)
from pawl.job_store.ledger.rules.rows import ConversationRow, Segment
from tests.unit.job_store.test_conversations import conversation
from tests.unit.job_store.world import STORE, USER, World

OPEN = frozenset({CallId("open")})


def user(number: int) -> Head:
    return Head(number=number, is_answer=False)


def answer(number: int, *call_ids: str) -> Head:
    return Head(number=number, is_answer=True, call_ids=tuple(map(CallId, call_ids)))


def summary(number: int) -> Head:
    return Head(number=number, is_answer=False, is_summary=True)


def segment(first: int, last: int, source: str) -> Segment:
    return Segment(first_number=first, last_number=last, source_conversation_id=ConversationId(source))


def row(conversation_id: str = "conv", last_number: int = 0, **fields: Any) -> ConversationRow:
    now = World().now
    return ConversationRow(
        store_id=STORE,
        conversation_id=ConversationId(conversation_id),
        user_id=USER,
        last_number=last_number,
        create_time=now,
        update_time=now,
        **fields,
    )


def test_a_fork_point_follows_an_answer_with_all_its_results() -> None:
    assert fork_points([user(1), answer(2), user(3)], OPEN) == (2,)
    assert fork_points([user(1), answer(2, "done"), answer(3), user(4), answer(5, "open")], OPEN) == (2, 3)
    assert fork_points([user(1), answer(2, "open"), answer(3)], OPEN) == ()
    assert fork_points([user(1)], OPEN) == ()
    assert fork_points([], OPEN) == ()


def test_summaries_do_not_affect_fork_points() -> None:
    assert fork_points([user(1), summary(2), answer(3), summary(4), user(5)], OPEN) == (3, 4)


heads = st.lists(st.sampled_from("uacos"), max_size=20).map(
    lambda kinds: [
        {"u": user, "a": answer, "c": lambda n: answer(n, f"c{n}"), "o": lambda n: answer(n, "open"), "s": summary}[
            kind
        ](number)
        for number, kind in enumerate(kinds, 1)
    ]
)


@given(heads, st.integers(0, 25))
def test_a_refusal_names_the_nearest_fork_points(every: list[Head], number: int) -> None:
    places = fork_points(every, OPEN)
    assert list(places) == sorted({*places})
    refused = open_point(number, places).metadata
    before, after = int(refused.get("before", 0)), int(refused.get("after", 0))
    assert before in {0, *places}
    assert after in {0, *places}
    assert not [place for place in places if before < place < number or number < place < (after or 99)]


@st.composite
def forked(draw: st.DrawFn) -> list[tuple[ConversationRow, tuple[Segment, ...]]]:
    """Draw a conversation, and forks of it or of each other with messages of their own."""
    made: list[tuple[ConversationRow, tuple[Segment, ...]]] = [(row("c0", draw(st.integers(1, 9))), ())]
    for name in range(1, draw(st.integers(1, 6))):
        source, segments = draw(st.sampled_from(made))
        number = draw(st.integers(1, source.last_number))
        path = path_to(source, segments, number)
        made.append((row(f"c{name}", number + draw(st.integers(0, 5)), past_number=number), path))
    return made


@given(forked())
def test_a_path_points_to_the_conversation_that_owns_each_message(
    made: list[tuple[ConversationRow, tuple[Segment, ...]]],
) -> None:
    """Each message number occurs once, in order, under the conversation that owns it."""
    own = {each.conversation_id: range(each.past_number + 1, each.last_number + 1) for each, _ in made}
    for each, segments in made:
        numbers = [n for part in segments for n in range(part.first_number, part.last_number + 1)]
        assert numbers == list(range(1, each.past_number + 1))
        for part in segments:
            assert {part.first_number, part.last_number} <= {*own[part.source_conversation_id]}


def test_the_number_of_segments_in_a_fork_is_limited() -> None:
    many = tuple(segment(n, n, f"c{n}") for n in range(1, SEGMENTS_MAX + 1))
    source = row("last", SEGMENTS_MAX + 1, past_number=SEGMENTS_MAX)
    assert path_to(source, many, SEGMENTS_MAX) == many
    with pytest.raises(PastTooLong):
        path_to(source, many, SEGMENTS_MAX + 1)


def test_adjacent_erased_segments_are_merged() -> None:
    erased = (segment(1, 2, ""), segment(3, 4, ""))
    assert path_to(row("c2", 6, past_number=4), erased, 6) == (segment(1, 4, ""), segment(5, 6, "c2"))


def test_removed_messages_count_as_missing_but_erased_ones_do_not() -> None:
    path = (segment(1, 4, ""), segment(5, 10, "c1"))
    assert is_whole(path, end_number=0, kept=6)
    assert not is_whole(path, end_number=0, kept=5)
    assert is_whole(path, end_number=7, kept=3)
    assert is_whole(path, end_number=10, kept=0)


def fork(world: World, *path: Segment, **fields: Any) -> ConversationRow:
    values: dict[str, Any] = {
        "store_id": STORE,
        "user_id": USER,
        "request_id": "",
        "fingerprint": b"f",
        "conversation_id": "conv",
        "number": path[-1].last_number,
        "path": path,
    }
    asked = ForkConversation(**(values | fields))
    world.unit.kept[asked.store_id, path] = (0, asked.number)
    made: ConversationRow = world.apply(asked)
    return made


def test_a_fork_continues_from_its_history_without_changing_the_original(world: World) -> None:
    world.submit(made_title="Lunch")
    before = conversation(world, "conv")
    made = fork(world, segment(1, 3, "conv"))
    assert (made.fork_of, made.past_number, made.last_number, made.made_title) == ("conv", 3, 3, "Lunch")
    world.submit(conversation_id=made.conversation_id)
    assert [row.number for row in world.unit.messages.rows] == [1, 4]
    assert conversation(world, "conv") == before


def test_forking_is_idempotent_by_request_id(world: World) -> None:
    """I2: a repeated request creates no second fork."""
    world.submit()
    made = fork(world, segment(1, 1, "conv"), request_id="r1")
    assert fork(world, segment(1, 2, "conv"), request_id="r1") == made
    with pytest.raises(RequestIdReused):
        fork(world, segment(1, 1, "conv"), request_id="r1", fingerprint=b"other")
    assert len(world.unit.segments.rows) == 1


@pytest.mark.parametrize("fields", [{"conversation_id": "absent"}, {"user_id": "bob"}, {"store_id": "globex"}])
def test_only_its_owner_can_fork_a_conversation(world: World, fields: dict[str, Any]) -> None:
    """I13: others do not find it."""
    world.submit()
    with pytest.raises(ConversationNotFound):
        fork(world, segment(1, 1, "conv"), **fields)
    assert not world.unit.segments.rows


def test_a_fork_shows_an_empty_id_for_an_erased_source(world: World) -> None:
    world.submit()
    fork(world, segment(1, 2, "gone"), segment(3, 4, "conv"))
    assert [each.source_conversation_id for each in world.unit.segments.rows] == ["", "conv"]
