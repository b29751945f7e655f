"""The record that the checkers judge: the outside history, and the ledger as protocol messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol

from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.job_store.ledger.rpc import messages
from tests.simulation.history import History, Sent
from tests.simulation.store import Tables


class Ledger(Protocol):
    @property
    def runs(self) -> Mapping[str, run_pb2.Run]: ...
    @property
    def calls(self) -> Mapping[str, call_pb2.Call]: ...
    @property
    def logs(self) -> Mapping[str, Sequence[event_pb2.RunEvent]]:
        """The events of each run, in order."""
        ...

    @property
    def messages(self) -> Mapping[str, Sequence[message_pb2.Message]]:
        """The messages of each conversation, in order."""
        ...


class Record:
    def __init__(self, tables: Tables, history: History) -> None:
        self.tables = tables
        self.history = history

    @cached_property
    def runs(self) -> dict[str, run_pb2.Run]:
        return {row.run_id: messages.run(row) for row in self.tables.runs.values()}

    @cached_property
    def calls(self) -> dict[str, call_pb2.Call]:
        """The calls, including those that trimming removed."""
        rows = [*self.tables.gone.values(), *self.tables.calls.values()]
        return {row.call_id: messages.call(row) for row in rows}

    @cached_property
    def messages(self) -> dict[str, list[message_pb2.Message]]:
        """The messages of each conversation, in order."""
        return {
            key.conversation_id: [messages.message(row, self.tables.conversations[key].user_id) for row in rows]
            for key, rows in self.tables.messages.items()
        }

    @cached_property
    def logs(self) -> dict[str, list[event_pb2.RunEvent]]:
        """The events of each run, in order."""
        return {
            key.run_id: [event_pb2.RunEvent.FromString(payload) for payload in payloads]
            for key, payloads in self.tables.events.items()
        }

    def written_at(self, run_id: str, seq: int) -> float:
        """Return when an event was written, by a clock that does not jump."""
        (times,) = [times for key, times in self.tables.written_at.items() if key.run_id == run_id]
        return times[seq - 1]

    def taken(self, *kinds: str) -> list[Sent]:
        """Return the accepted commands of these kinds."""
        return [sent for sent in self.history.commands if sent.taken and sent.kind in kinds]

    def texts(self, text: str) -> int:
        return sum(
            message.text.count(text)
            for conversation in self.messages.values()
            for message in conversation
            if message.role == message_pb2.ROLE_USER
        )


def broken(*rules: tuple[object, str]) -> Iterator[str]:
    """Yield the description of each broken rule."""
    return (text for is_broken, text in rules if is_broken)


def call_changes(log: Iterable[event_pb2.RunEvent]) -> Iterator[tuple[event_pb2.RunEvent, call_pb2.Call]]:
    return ((event, event.call_changed.call) for event in log if event.HasField("call_changed"))


def run_state(number: int) -> str:
    return run_pb2.RunState.Name(run_pb2.RunState.ValueType(number)).removeprefix("RUN_STATE_") if number else ""


def call_state(number: int) -> str:
    return call_pb2.CallState.Name(call_pb2.CallState.ValueType(number)).removeprefix("CALL_STATE_") if number else ""


def seconds(event: event_pb2.RunEvent) -> float:
    return event.time.seconds + event.time.nanos / 1e9
