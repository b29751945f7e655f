"""The ledger against its reference model: any asks in any order (I1 to I4, I6, I7, I9 to I13, I16)."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.ledger.machine import LedgerMachine

_EXAMPLES = int(os.environ.get("TESTS_EXAMPLES", "60"))

LedgerMachine.TestCase.settings = settings(
    max_examples=_EXAMPLES, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.timeout(3600)
class TestLedger(LedgerMachine.TestCase):  # type: ignore[misc,valid-type]  # made at run time
    """`TESTS_EXAMPLES=20000` runs all night."""
