from __future__ import annotations

from pawl.errors import InvalidField, Kind, NotFound, RunNotFound, by_kind, by_reason


def test_an_error_carries_what_programs_branch_on() -> None:
    error = InvalidField("must be positive", field="limit", got=-1)
    assert (error.kind, error.reason, error.message) == (Kind.INVALID_ARGUMENT, "INVALID_FIELD", "must be positive")
    assert error.metadata == {"field": "limit", "got": "-1"}


def test_errors_are_caught_by_kind() -> None:
    assert issubclass(RunNotFound, NotFound)
    assert set(by_kind) == set(Kind)
    for error in by_reason.values():
        assert issubclass(error, by_kind[error.kind])
