"""What a browser keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.errors import InvalidField, SessionExpired, Unauthenticated
from pawl.gateway.adapters.seal import Seal
from pawl.gateway.domain import session
from pawl.gateway.domain.session import Session

KEY = "k" * 32


def test_a_session_comes_back_as_it_was() -> None:
    found = Session(key="secret", end_time=100.0, store="acme", user="ann")
    sealed = Seal(KEY).close(found)
    assert "secret" not in sealed
    assert Seal(KEY).open(sealed, Session) == found
    assert found.metadata == (("authorization", "Bearer secret"), ("pawl-store", "acme"), ("pawl-user", "ann"))
    assert Session(key="secret", end_time=1.0).metadata == (("authorization", "Bearer secret"),)


def test_keys_can_be_changed_while_sessions_go_on() -> None:
    sealed = Seal(KEY).close(Session(key="a", end_time=1.0))
    assert Seal(f"new{KEY}, {KEY}").open(sealed, Session).key == "a"
    with pytest.raises(Unauthenticated):
        Seal(f"new{KEY}").open(sealed, Session)


@given(st.text(max_size=200))
def test_nobody_makes_a_session_up(sealed: str) -> None:
    with pytest.raises(Unauthenticated):
        Seal(KEY).open(sealed, Session)


def test_one_changed_letter_is_no_session() -> None:
    sealed = Seal(KEY).close(Session(key="a", end_time=1.0))
    # Of the last letter before the padding a part stands for nothing.
    for place in range(0, len(sealed.rstrip("=")) - 1, 7):
        other = sealed[:place] + ("A" if sealed[place] != "A" else "B") + sealed[place + 1 :]
        with pytest.raises(Unauthenticated):
            Seal(KEY).open(other, Session)


def test_a_session_is_over_at_its_end() -> None:
    found = Session(key="a", end_time=100.0)
    assert session.check_live(found, 99.9) is found
    with pytest.raises(SessionExpired):
        session.check_live(found, 100.0)


def test_a_key_that_no_cookie_holds_is_refused() -> None:
    sealed = Seal(KEY).close(Session(key="k" * 3000, end_time=1.0))
    with pytest.raises(InvalidField, match="too long"):
        session.check_sealed(sealed)
    session.check_sealed(Seal(KEY).close(Session(key="k" * 2500, end_time=1.0)))


@pytest.mark.parametrize("value", ["\u00e9", "a\nb", "a\tb", "a\x7f", "a\0"])
@pytest.mark.parametrize("field", ["key", "pawl-store", "pawl-user"])
def test_what_metadata_cannot_hold_is_refused(field: str, value: str) -> None:
    given = {"key": "k", "pawl-store": "", "pawl-user": ""} | {field: value}
    with pytest.raises(InvalidField) as raised:
        session.metadata(given["key"], store=given["pawl-store"], user=given["pawl-user"])
    assert raised.value.metadata["field"] == field
