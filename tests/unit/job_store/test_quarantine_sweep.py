"""A run is quarantined for a worker that is gone, never for a clock of the database that jumped."""

from __future__ import annotations

from pawl.chassis.ids import RunId, RunKey, StoreId
from pawl.job_store.ledger.rules.attention import Silence


def test_looks_begin_anew_after_a_pause() -> None:
    """While the database was away, no worker could renew its lease."""
    key = RunKey(StoreId("store"), RunId("run"))
    silence = Silence()
    for now in (0.0, 1.0, 2.0, 3.0):
        silence = silence.after([key], now)
    assert silence.after([key], 20.0).confirmed == ()
    for now in (4.0, 5.0):
        silence = silence.after([key], now)
    assert silence.confirmed == (key,)


def test_a_lease_that_was_renewed_in_between_begins_anew() -> None:
    key, silence = RunKey(StoreId("store"), RunId("run")), Silence()
    for now in range(20):
        silence = silence.after([] if now % 4 == 0 else [key], float(now))
        assert silence.confirmed == ()
