"""Bytes of an event stream, cut anywhere, give the same events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.agent_loop.adapters.model.sse import EVENT_BYTES_MAX, EventTooLargeError, SseDecoder

LINES = st.sampled_from(
    [b"data: one", b"data:two", b"data:  three", b"data", b": a comment", b":", b"event: x", b"id: 7", b"", b"", b"x"]
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=12).map(
    lambda lines: b"".join(line + end for line, end in lines)
)


def decode(*chunks: bytes) -> list[bytes]:
    decoder = SseDecoder()
    events = [event for chunk in chunks for event in decoder.feed(chunk)]
    rest = decoder.flush()
    return events + ([rest] if rest is not None else [])


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b": life sign\n\ndata: a\n\n: life sign\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"event: error\ndata: a\nid: 3\nretry: 5\n\n", [b"a"]),
        (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
        (b"data: a\n\ndata: unfinished", [b"a", b"unfinished"]),
        (b"\n\n\n", []),
        (b"", []),
    ],
)
def test_events_are_read_as_the_standard_says(stream: bytes, events: list[bytes]) -> None:
    assert decode(stream) == events


@given(STREAMS, st.lists(st.integers(min_value=0, max_value=200), max_size=20), st.booleans())
def test_the_same_bytes_give_the_same_events_however_they_are_cut(stream: bytes, cuts: list[int], bom: bool) -> None:
    """LOOP-2"""
    stream = b"\xef\xbb\xbf" * bom + stream
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[start:end] for start, end in itertools.pairwise(places)]
    assert decode(*chunks) == decode(stream) == decode(*(bytes([byte]) for byte in stream))


def test_an_event_is_given_before_the_next_one_begins() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: a\r\n\r") == [b"a"]
    assert decoder.feed(b"\ndata: b") == []
    assert decoder.feed(b"\n\n") == [b"b"]


def test_a_crlf_cut_in_two_is_one_line_end() -> None:
    assert decode(b"data: a\r", b"", b"\ndata: b\r\n\r\n") == [b"a\nb"]


def test_an_endless_line_is_refused() -> None:
    decoder = SseDecoder()
    with pytest.raises(EventTooLargeError):
        for _ in range(EVENT_BYTES_MAX // 65536 + 2):
            decoder.feed(b"x" * 65536)


def test_an_endless_event_is_refused() -> None:
    decoder = SseDecoder()
    with pytest.raises(EventTooLargeError):
        for _ in range(EVENT_BYTES_MAX // 65536 + 2):
            decoder.feed(b"data: " + b"x" * 65536 + b"\n")
