from __future__ import annotations

import pytest

from pawl.errors import InvalidField, Kind, NotFound, PawlError, RunNotFound, by_kind, by_reason


@pytest.mark.parametrize("error", by_reason.values())
def test_every_error_has_a_message_without_being_given_one(error: type[PawlError]) -> None:
    assert len(error().message) > 5
    assert str(error()) == error().message


def test_an_error_carries_what_programs_branch_on() -> None:
    error = InvalidField("must be positive", field="limit", got=-1)
    assert (error.kind, error.reason, error.message) == (Kind.INVALID_ARGUMENT, "INVALID_FIELD", "must be positive")
    assert error.metadata == {"field": "limit", "got": "-1"}


def test_errors_are_caught_by_kind() -> None:
    assert issubclass(RunNotFound, NotFound)
    assert set(by_kind) == set(Kind)
    for error in by_reason.values():
        assert issubclass(error, by_kind[error.kind])
