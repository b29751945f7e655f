"""The text of a run, piece by piece: at any time the answers so far, and what has come of the next one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pawl.client.text import TextReader
from pawl.event.v1 import event_pb2, gap_pb2, message_pb2

WORDS = st.text("ab \n", max_size=4)


class Model:
    """A run whose model writes, fails, is taken over and summarises, as its log tells it."""

    def __init__(self) -> None:
        self.events: list[event_pb2.RunEvent | gap_pb2.Gap] = []
        self.answers: list[str] = []
        self.open = ""
        self._epoch = self._round = self._model_attempt = 1

    def tell(self, **fields: Any) -> None:
        self.events.append(event_pb2.RunEvent(attempt=self._epoch, seq=len(self.events) + 1, **fields))

    def begin(self, *, summary: bool = False) -> None:
        started = event_pb2.RoundStarted(round=self._round, model_attempt=self._model_attempt, summary=summary)
        self.tell(round_started=started)
        self.open = ""

    def write(self, text: str, *, refusal: bool = False) -> None:
        kind = "refusal" if refusal else "text"
        delta = event_pb2.OutputDelta(round=self._round, model_attempt=self._model_attempt, **{kind: text})  # type: ignore[arg-type]
        self.tell(output_delta=delta)
        self.open += text

    def fail(self) -> None:
        self.tell(round_retrying=event_pb2.RoundRetrying(round=self._round))
        self._model_attempt += 1
        self.open = ""

    def take_over(self) -> None:
        self._epoch += 1
        self.tell(warning=event_pb2.Warning())
        self.open = ""

    def resume(self, text: str) -> None:
        """Write by another worker, of whom nothing was heard before."""
        self._epoch += 1
        self.open = ""
        self.write(text)

    def retry(self, text: str) -> None:
        """Write in another attempt, without a word about the one before."""
        self._model_attempt += 1
        self.open = ""
        self.write(text)

    def add(self, role: message_pb2.Role.ValueType, text: str) -> None:
        self.tell(message_added=event_pb2.MessageAdded(message=message_pb2.Message(role=role, text=text)))
        if role == message_pb2.ROLE_ASSISTANT:
            self.answers += [text] if text else []
            self.open = ""
            self._round, self._model_attempt = self._round + 1, 1

    def lose(self) -> None:
        gap = gap_pb2.Gap()
        for text in self.answers:
            gap.snapshot.messages.add(role=message_pb2.ROLE_ASSISTANT, text=text)
        self.events.append(gap)
        self.open = ""

    def whole(self) -> str:
        return "\n\n".join([*self.answers, *([self.open] if self.open else [])])


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["begin", "fail", "take_over", "lose"])),
        st.tuples(st.sampled_from(["write", "resume", "retry"]), WORDS),
        st.tuples(st.just("refuse"), WORDS),
        st.tuples(st.just("user"), WORDS),
        st.tuples(st.just("answer"), st.none() | WORDS),
        st.tuples(st.just("summarise"), WORDS),
    ),
    max_size=30,
)


def play(model: Model, step: Any) -> None:
    match step:
        case ("write" | "resume" | "retry" as name, text):
            getattr(model, name)(text)
        case ("refuse", text):
            model.write(text, refusal=True)
        case ("user", text):
            model.add(message_pb2.ROLE_USER, text)
        case ("answer", None):
            model.add(message_pb2.ROLE_ASSISTANT, model.open)
        case ("answer", text):
            model.add(message_pb2.ROLE_ASSISTANT, text)
        case ("summarise", text):
            model.begin(summary=True)
            model.write(text)
            model.open = ""
            model.add(message_pb2.ROLE_SUMMARY, text)
            model.begin()
        case (name,):
            getattr(model, name)()


@given(STEPS)
def test_the_pieces_are_the_answers_whatever_fails_and_whoever_takes_over(steps: list[Any]) -> None:
    """EVT-1."""
    model, reader, shown = Model(), TextReader(), ""
    for step in steps:
        play(model, step)
        for event in model.events:
            piece = reader.take(event)
            if piece is not None:
                assert 0 <= piece.takes_back <= len(shown)
                assert piece or piece.takes_back
                shown = shown[: len(shown) - piece.takes_back] + piece
        model.events.clear()
        assert shown == model.whole()


def test_what_comes_is_given_at_once_and_nothing_twice() -> None:
    model, reader = Model(), TextReader()
    model.begin()
    model.write("I look ")
    model.write("it up.")
    model.add(message_pb2.ROLE_ASSISTANT, "I look it up.")
    model.begin()
    model.write("It is 4.")
    model.add(message_pb2.ROLE_ASSISTANT, "It is 4.")
    pieces = [piece for event in model.events if (piece := reader.take(event)) is not None]
    assert pieces == ["I look ", "it up.", "\n\nIt is 4."]
    assert not any(piece.takes_back for piece in pieces)


def test_a_piece_says_how_much_is_void() -> None:
    model, reader = Model(), TextReader()
    model.begin()
    model.write("It is fi")
    model.fail()
    model.write("It is 4.")
    pieces = [piece for event in model.events if (piece := reader.take(event)) is not None]
    assert [(piece, piece.takes_back) for piece in pieces] == [("It is fi", 0), ("", 8), ("It is 4.", 0)]
