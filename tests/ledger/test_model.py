"""The ledger against its reference model: any asks in any order (I1 to I4, I6, I7, I9 to I13, I16)."""

from __future__ import annotations

import os

import pytest

from tests.ledger.game import first_difference

_SEEDS = int(os.environ.get("TESTS_EXAMPLES", "100"))


@pytest.mark.timeout(3600)
def test_ledger_agrees_with_its_reference_model() -> None:
    """`TESTS_EXAMPLES=200000` runs all night."""
    assert first_difference(range(_SEEDS)) == ""
