"""Texts of strangers as who decides about them must see them."""

from __future__ import annotations

import json
import time
import unicodedata
from datetime import UTC, datetime

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.cli import wording
from pawl.cli.runs import State
from pawl.event.v1 import call_pb2, run_pb2
from pawl.identity.v1 import key_pb2

HIDDEN = {
    "override": "\u202e",
    "isolate": "\u2066",
    "mark of direction": "\u200e",
    "zero-width space": "\u200b",
    "zero-width joiner": "\u200d",
    "word joiner": "\u2060",
    "byte order mark": "\ufeff",
    "tag": "\U000e0041",
    "variation selector": "\ufe01",
    "far variation selector": "\U000e0100",
    "soft hyphen": "\u00ad",
    "blank letter": "\u3164",
    "escape": "\x1b",
    "carriage return": "\r",
}


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
def test_what_cannot_be_seen_is_shown_where_somebody_decides(hidden: str) -> None:
    """HITL-3: who approves approves what is there, and not what it looks like."""
    call = call_pb2.Call(
        state=call_pb2.CALL_STATE_AWAITING_APPROVAL,
        tool_name="send_email",
        arguments_json=json.dumps({"to": f"ann{hidden}@example.com"}, ensure_ascii=False).encode(),
        approval=call_pb2.ApprovalRequest(digest="d", preview=f"To ann{hidden}@example.com"),
    )
    lines = wording.call_lines(call, datetime.now(UTC))
    assert not any(hidden in line for line in lines)
    assert f"To ann<U+{ord(hidden):04X}>@example.com" in lines
    (arguments,) = (line for line in lines if '"to"' in line)
    assert "ann\\" in arguments


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
def test_what_is_edited_still_means_the_same(hidden: str) -> None:
    value = {"to": f"ann{hidden}@example.com"}
    block = wording.json_block(json.dumps(value, ensure_ascii=False).encode())
    assert hidden not in block
    assert json.loads(block) == value


def test_a_document_line_has_all_of_a_message() -> None:
    event = key_pb2.KeyEvent(event_id=2**53, kind=key_pb2.KEY_EVENT_KIND_KEY_CREATED, roles=["member"], key_name='"x')
    event.time.FromSeconds(1_700_000_000)
    line = json.loads(wording.document_line(event))
    assert set(line) == set(event.DESCRIPTOR.fields_by_name)
    told = {"event_id": 2**53, "kind": "key_created", "roles": ["member"], "key_name": '"x', "user_id": ""}
    told |= {"time": "2023-11-14T22:13:20Z", "failures": None}
    assert {name: line[name] for name in told} == told
    event.failures.kind, event.failures.count = 99, 3  # type: ignore[assignment]  # one of a later version
    assert json.loads(wording.document_line(event))["failures"] == {
        "kind": "99",
        "source": "",
        "count": 3,
        "first_time": None,
        "last_time": None,
    }


def test_no_format_character_of_unicode_is_left_out() -> None:
    formats = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in {"Cc", "Cf", "Zl", "Zp"}]
    assert [text for text in formats if text not in "\t\n" and wording.clean(text) == text] == []


def test_pictures_and_letters_stay_as_they_are() -> None:
    text = "Grüße, \u2764\ufe0f \U0001f469\u200d\U0001f4bb \u65e5\u672c\t\u05e2\u05d1\nline"
    assert wording.clean(text) == text
    assert wording.clean("a\r\nb") == "a\nb"


def test_each_state_of_a_run_can_be_typed() -> None:
    assert [f"RUN_STATE_{state.name}" for state in State] == run_pb2.RunState.keys()[1:]
    assert [state.value.replace("-", " ") for state in State] == [
        wording.state_name(number) for number in run_pb2.RunState.values()[1:]
    ]


@pytest.mark.parametrize(
    ("zone", "told"),
    [("UTC", "2026-11-24 13:00:00Z"), ("Europe/Berlin", "2026-11-24 14:00:00+01:00")],
)
def test_a_time_is_told_with_its_zone_as_options_take_it(monkeypatch: pytest.MonkeyPatch, zone: str, told: str) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        moment = Timestamp(seconds=1_795_525_200)
        assert wording.time_text(moment) == told
        assert datetime.fromisoformat(told).timestamp() == moment.seconds
    finally:
        monkeypatch.undo()
        time.tzset()
