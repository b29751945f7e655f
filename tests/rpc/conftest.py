"""Checks that every service returns only errors named in the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pawl.errors import PawlError
from pawl.server.rpc.interceptor import Method
from tests.tables import documented


@pytest.fixture(autouse=True)
def errors_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test if a method returns a reason that neither its comment nor error.proto names."""
    refusal = Method._refusal
    undocumented: set[str] = set()

    def noting(method: Method, error: Exception, call: Any) -> PawlError:
        refused = refusal(method, error, call)
        allowed = documented().get(method.name)
        if allowed is not None and refused.reason not in allowed and not _is_credential_error(refused):
            undocumented.add(f"{method.name} answers {refused.reason}")
        return refused

    monkeypatch.setattr(Method, "_refusal", noting)
    yield
    assert not undocumented, "add it to the comment of the method"


def _is_credential_error(error: PawlError) -> bool:
    """Return whether any method may return this error because the credential lacks a permission."""
    return error.reason == "PERMISSION_DENIED" and error.message.startswith(
        ("this method ", "this requires one of the roles ", "this requires the ", "the metadata ")
    )
