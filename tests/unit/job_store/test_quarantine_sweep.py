"""A run is quarantined for a dead worker, never for a jump of the database clock."""

from __future__ import annotations

from pawl.chassis.ids import RunId, RunKey, StoreId
from pawl.job_store.ledger.rules.attention import Silence


def test_a_gap_between_polls_restarts_the_silence_count() -> None:
    """While the database was unavailable, no worker could renew its lease."""
    key = RunKey(StoreId("store"), RunId("run"))
    silence = Silence()
    for now in (0.0, 1.0, 2.0, 3.0):
        silence = silence.after([key], now)
    assert silence.after([key], 20.0).confirmed == ()
    for now in (4.0, 5.0):
        silence = silence.after([key], now)
    assert silence.confirmed == (key,)


def test_a_renewed_lease_resets_the_silence() -> None:
    key, silence = RunKey(StoreId("store"), RunId("run")), Silence()
    for now in range(20):
        silence = silence.after([] if now % 4 == 0 else [key], float(now))
        assert silence.confirmed == ()
