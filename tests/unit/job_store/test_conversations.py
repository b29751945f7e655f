"""Conversations: keys, titles, archiving, search words, and one active run with a queue (LOOP-13)."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.errors import (
    ConversationBusy,
    ConversationNotFound,
    InvalidField,
    PastTooLong,
    PawlError,
    QueueFull,
    RequestIdReused,
    TooLarge,
)
from pawl.job_store.ledger.rules import search
from pawl.job_store.ledger.rules.conversations import (
    MADE_TITLE_CHARACTERS_MAX,
    UpdateConversation,
    key_hash,
    made_title,
    title_in_reply,
)
from pawl.job_store.ledger.rules.forks import (
    SEGMENTS_MAX,
    ForkConversation,
    Head,
    fork_points,
    is_whole,
    open_point,
    path_to,
)
from pawl.job_store.ledger.rules.rows import ConversationKey, ConversationRow, Segment
from pawl.values import CallState, MessagePolicy, RunState, StopCause
from tests.unit.job_store.world import STORE, USER, World, change, delegation

KEY = key_hash(STORE, USER, "ticket 42")


def conversation(world: World, conversation_id: str) -> ConversationRow:
    found = world.unit.conversations.get(ConversationKey(STORE, ConversationId(conversation_id)))
    assert found is not None
    return found


def update(world: World, **fields: Any) -> ConversationRow:
    values: dict[str, Any] = {
        "store_id": STORE,
        "user_id": USER,
        "request_id": "",
        "fingerprint": b"f",
        "conversation_id": "conv",
    }
    changed: ConversationRow = world.apply(UpdateConversation(**(values | fields)))
    return changed


def keyed(world: World, policy: MessagePolicy = MessagePolicy.QUEUE, **fields: Any) -> str:
    return world.submit(policy, **({"conversation_id": "", "key_hash": KEY} | fields)).run.conversation_id


def test_messages_with_the_same_key_share_a_conversation(world: World) -> None:
    first = keyed(world)
    assert (keyed(world), conversation(world, first).key_hash) == (first, KEY)
    assert len(conversation(world, first).queue) == 1
    assert keyed(world, key_hash=key_hash(STORE, USER, "ticket 43")) != first


def test_a_key_belongs_to_one_user_of_one_store() -> None:
    """I13: users who choose the same key get separate conversations."""
    bob = UserId("bob")
    assert len({key_hash(StoreId(s), UserId(u), "k") for s, u in (("a", "bc"), ("ab", "c"), ("a", "b"))}) == 3
    world = World()
    assert keyed(world) != keyed(world, user_id=bob, key_hash=key_hash(STORE, bob, "ticket 42"))
    # Even if the hashes are equal: the user id is part of the key.
    assert keyed(world, user_id=bob) != keyed(world)


def test_a_refused_message_with_a_new_key_does_not_create_a_conversation(world: World) -> None:
    with pytest.raises(PawlError):
        keyed(world, queue_max=0, store_queue_max=0, store_slots=0)
    assert not list(world.unit.conversations.items())


def test_the_title_comes_from_the_first_message_until_it_is_set(world: World) -> None:
    world.submit(made_title="Lunch on Friday")
    world.submit(made_title="Another one")
    assert (conversation(world, "conv").made_title, update(world, title="Lunch").title) == ("Lunch on Friday", "Lunch")
    assert update(world, title="").made_title == "Lunch on Friday"


def test_titles_and_archiving_do_not_change_the_update_time(world: World) -> None:
    before = conversation(world, world.submit().run.conversation_id).update_time
    world.advance(60)
    assert update(world, title="Lunch", archived=True).update_time == before


@pytest.mark.parametrize("policy", MessagePolicy)
def test_the_next_message_unarchives_a_conversation_unless_it_is_refused(world: World, policy: MessagePolicy) -> None:
    world.submit()
    assert update(world, archived=True).archived
    with pytest.raises(ConversationBusy) if policy is MessagePolicy.REJECT else nullcontext():
        world.submit(policy)
    assert conversation(world, "conv").archived == (policy is MessagePolicy.REJECT)


def test_an_update_is_idempotent(world: World) -> None:
    """I2: a repeated request does not change the title again."""
    world.submit()
    update(world, request_id="r1", title="first")
    update(world, title="second")
    assert update(world, request_id="r1", title="first").title == "second"
    for reuse in (partial(update, world, title="third"), world.submit):
        with pytest.raises(RequestIdReused):
            reuse(request_id="r1", fingerprint=b"other")


def test_a_child_runs_conversation_names_its_parent(world: World) -> None:
    parent = world.start_run()
    asked = change("call", CallState.DELEGATED, child_run_id="child")
    world.commit(parent, calls=(asked,), delegations=(delegation("call", "child", made_title="the task"),))
    found = conversation(world, world.run("child").conversation_id)
    assert (found.parent_run_id, found.made_title) == (RunId(parent), "the task")


@given(st.text(max_size=300))
@example("\n\n  \t\nhello")
@example("x" * 500)
@example("word " * 100)
@example("a\u2028b\x85c\x1cd\x00e")
def test_a_generated_title_is_one_short_line_and_stable(text: str) -> None:
    title = made_title(text)
    assert (len(title) <= 80, title.isprintable(), len(title.splitlines()) <= 1) == (True, True, True)
    assert title == " ".join(title.split()) == made_title(title)


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("\n \nWhat is  17 * 23?\nThank you", "What is 17 * 23?"),
        ("\n\t ", ""),
        (
            "the quick brown fox jumps over the lazy dog and then it sleeps until the next morning comes",
            "the quick brown fox jumps over the lazy dog and then it sleeps until the next…",
        ),
        ("y" * 100, "y" * 79 + "…"),
    ],
)
def test_a_generated_title_is_the_first_nonblank_line(text: str, title: str) -> None:
    assert made_title(text) == title


@given(st.text(max_size=200))
@example("Straße ﬁne 東京")
def test_search_words_are_short_and_safe_in_a_query(text: str) -> None:
    for word in search.words(text):
        assert 0 < len(word) <= search.WORD_CHARACTERS_MAX
        assert not set(word) & set(" '\\&|!():*<>_\0\n")


def test_search_words_are_normalised_and_limited_in_length() -> None:
    words = {
        "Invoice INV-2024/17, ﬁnal": ("invoice", "inv", "2024", "17", "final"),
        "STRASSE": search.words("Straße"),
        "東京 tower": ("東", "京", "tower"),
        "x" * 10_000: ("x" * search.WORD_CHARACTERS_MAX,),
    }
    assert {text: search.words(text) for text in words} == words


def test_the_number_of_search_words_per_text_is_limited() -> None:
    assert len(search.words(" ".join(map(str, range(5000))))) == search.WORDS_MAX
    assert search.words("\ufdfa" * 100_000)


@pytest.mark.parametrize("query", ["?!", "---", " ", "x" * 201, "é" * 101])
def test_an_empty_or_too_long_query_is_refused(query: str) -> None:
    with pytest.raises(TooLarge if len(query) > 100 else InvalidField):
        search.query_words(query)


def test_a_query_uses_at_most_eight_words() -> None:
    assert search.query_words("") == ()
    assert search.query_words("a b c d e f g h i j") == tuple("abcdefgh")


def test_a_key_has_at_most_200_bytes() -> None:
    assert key_hash(STORE, USER, "é" * 100) != KEY
    with pytest.raises(TooLarge):
        key_hash(STORE, USER, "é" * 100 + "x")


@pytest.mark.parametrize(
    ("written", "title"),
    [
        ("Lunch with Ann", "Lunch with Ann"),
        ('"Lunch with Ann"', "Lunch with Ann"),
        ("\n\n**„Essen mit Ann“**\nThat is a good title.", "Essen mit Ann"),
        ("# Lunch\twith\x1b[31m Ann\u202e", "Lunch with [31m Ann"),
        ("<think>\nWhat is it about?\n</think>\nLunch with Ann", "Lunch with Ann"),
        ('""\n***\n', ""),
        ("", ""),
    ],
)
def test_a_title_is_the_first_line_without_decoration(written: str, title: str) -> None:
    assert title_in_reply(written) == title


@given(st.text())
def test_a_title_is_always_one_short_line(written: str) -> None:
    title = title_in_reply(written)
    assert (len(title) <= MADE_TITLE_CHARACTERS_MAX, title.isprintable(), title) == (True, True, title.strip())


def test_a_second_message_enters_the_conversation_only_when_its_turn_starts(world: World) -> None:
    """A message sent during a run must not enter the middle of that run's history."""
    first = world.start_run()
    second = world.submit().run
    assert (second.state, second.claim_at) == (RunState.QUEUED, None)
    assert world.event_types(second.run_id) == ["run.queued"]
    assert [message.number for message in world.unit.messages.rows] == [1]
    world.commit(first, state=RunState.COMPLETED)
    assert world.run(second.run_id).claim_at == world.now
    assert world.event_types(second.run_id) == ["run.queued", "message.added"]
    assert [message.number for message in world.unit.messages.rows] == [1, 2]


def test_two_interrupting_messages_both_enter_in_order(
    world: World,
) -> None:
    """The result is the same as if the first run had started before the second message arrived."""
    active = world.start_run()
    waiting = world.submit().run.run_id
    first, second, third = (world.submit(MessagePolicy.INTERRUPT).run.run_id for _ in range(3))
    assert [world.run(run_id).state for run_id in (first, second, third)] == [RunState.QUEUED] * 3
    world.commit(active, state=RunState.CANCELLED)
    for superseded in map(world.run, (first, second)):
        assert (superseded.state, superseded.stop_cause) == (RunState.CANCELLED, StopCause.SUPERSEDED)
        assert world.event_types(superseded.run_id) == ["run.queued", "message.added", "run.cancelled"]
    assert world.run(third).claim_at == world.now
    assert [message.run_id for message in world.unit.messages.rows] == [active, first, second, third]
    world.claim(third)
    world.commit(third, state=RunState.COMPLETED)
    assert world.run(waiting).claim_at == world.now


def test_messages_to_a_superseded_run_are_kept(world: World) -> None:
    """I1: the run's worker puts the message into the conversation before the next run starts."""
    active = world.start_run()
    first = world.submit(MessagePolicy.INTERRUPT).run.run_id
    world.steer(first)
    second = world.submit(MessagePolicy.INTERRUPT).run.run_id
    world.commit(active, state=RunState.CANCELLED)
    assert (world.run(first).state, world.run(second).claim_at) == (RunState.CANCELLING, None)
    assert world.claim(first) == 1
    world.commit(first, state=RunState.CANCELLED, consumed=world.unread(first))
    assert world.run(second).claim_at == world.now


def test_the_queue_is_bounded(world: World) -> None:
    world.submit()
    for _ in range(3):
        world.submit(queue_max=3)
    with pytest.raises(QueueFull):
        world.submit(queue_max=3)


def test_a_run_that_ends_in_the_same_group_frees_its_queue_slot(world: World) -> None:
    """LOOP-14: each operation of a group updates the counts that were read at the group's start."""
    idle = world.submit(store_queue_max=1).run.run_id
    with pytest.raises(QueueFull):
        world.submit(conversation_id="other", store_queue_max=1)
    world.cancel(idle)
    world.submit(conversation_id="other", store_queue_max=1)
    with pytest.raises(QueueFull):
        world.submit(store_queue_max=1)


def test_submitting_is_idempotent_and_reusing_an_id_is_refused(world: World) -> None:
    """I2, LOOP-1: the message is stored once, even if it steers a run."""
    run = world.submit(request_id="r1").run
    world.claim(run.run_id)
    assert (world.submit(request_id="r1").run, len(world.unit.messages.rows)) == (world.run(run.run_id), 1)
    with pytest.raises(RequestIdReused):
        world.submit(request_id="r1", fingerprint=b"other")
    steered = world.submit(MessagePolicy.STEER, request_id="r2")
    assert world.submit(MessagePolicy.STEER, request_id="r2").steered
    assert len(world.unit.inbox(world.run(steered.run.run_id))) == 1


# Forks of conversations: where they start, and the paths to inherited messages.


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


@pytest.mark.parametrize(
    ("messages", "points"),
    [
        ([user(1), answer(2), user(3)], (2,)),
        ([user(1), answer(2, "done"), answer(3), user(4), answer(5, "open")], (2, 3)),
        ([user(1), answer(2, "open"), answer(3)], ()),
        ([user(1)], ()),
        ([], ()),
        ([user(1), summary(2), answer(3), summary(4), user(5)], (3, 4)),
    ],
)
def test_a_fork_point_follows_an_answer_with_all_its_results(messages: list[Head], points: tuple[int, ...]) -> None:
    """A summary after an answer does not change that."""
    assert fork_points(messages, OPEN) == points


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
    assert {before, after} <= {0, *places}
    assert not [place for place in places if before < place < number or number < place < (after or 99)]


@st.composite
def forked(draw: st.DrawFn) -> list[tuple[ConversationRow, tuple[Segment, ...]]]:
    """Draw a conversation, and forks of it or of each other that have messages of their own."""
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
    """Each inherited message number occurs once, in order, under the conversation that owns it."""
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


def test_removed_messages_count_as_missing_while_erased_messages_do_not() -> None:
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
    assert ([row.number for row in world.unit.messages.rows], conversation(world, "conv")) == ([1, 4], before)


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
    """I13: for other users the conversation does not exist."""
    world.submit()
    with pytest.raises(ConversationNotFound):
        fork(world, segment(1, 1, "conv"), **fields)
    assert not world.unit.segments.rows


def test_a_fork_shows_an_empty_id_for_an_erased_source(world: World) -> None:
    world.submit()
    fork(world, segment(1, 2, "gone"), segment(3, 4, "conv"))
    assert [each.source_conversation_id for each in world.unit.segments.rows] == ["", "conv"]
