"""Mutants that show only during faults of other services or the database."""

from __future__ import annotations

from tests.simulation.planted import REFERENCE_MODEL, Mutant

_WORKER = "pawl.agent_loop.loop.worker"
_DRIVE = "pawl.agent_loop.loop.drive"
_RETRY = "pawl.chassis.rpc.retry"

_TRANSIENT = (
    _RETRY,
    "TRANSIENT: Final = (*UNAVAILABLE, Internal)",
    "TRANSIENT: Final = UNAVAILABLE",
)

_FORGETS = """\
        if claim in self._held and self._held[claim].task is ended:
            del self._held[claim]
        how = "lost" if ended.cancelled() else "crashed"
"""
_FORGETS_WHAT_ENDED_WELL = """\
        how = "lost" if ended.cancelled() else ended.result()
        del self._held[claim]
"""

OF_OUTAGES = (
    Mutant(
        name="unreleasable_runs_are_held_forever",
        module=_WORKER,
        text="        except Exception as error:  # noqa: BLE001  # the next renewal tries the run again\n",
        instead="        except RunNotFound as error:\n",
        checker="runs_end",
        seed=31,
        also=(
            (_WORKER, _FORGETS, _FORGETS_WHAT_ENDED_WELL),
            (_WORKER, "held is not None and not held.task.done()", "held is not None"),
            _TRANSIENT,
        ),
    ),
    Mutant(
        name="internal_errors_are_final_immediately",
        module=_TRANSIENT[0],
        text=_TRANSIENT[1],
        instead=_TRANSIENT[2],
        checker="no_crash",
        seed=2,
    ),
    Mutant(
        name="active_time_uses_the_database_clock",
        module=_DRIVE,
        text="        return self._dependencies.clock.monotonic() - self._active_from\n",
        instead="        return self._now() - self._active_from\n",
        checker="time_limits_use_real_time",
        seed=26,
        also=(
            (
                _DRIVE,
                "self._active_from = self._dependencies.clock.monotonic() - self._base.run.active_seconds",
                "self._active_from = self._now() - self._base.run.active_seconds",
            ),
        ),
    ),
    Mutant(
        name="interrupts_run_in_reverse_order",
        module="pawl.job_store.ledger.rules.submit",
        text="index = sum(waiting in interrupting for waiting in queue) if first else len(queue)",
        instead="index = 0 if first else len(queue)",
        checker=REFERENCE_MODEL,
        seed=96,
    ),
    Mutant(
        name="failed_models_are_used_again",
        module="pawl.agent_loop.loop.rules.state",
        text="self.loop.fallbacks_used, len(models) - 1",
        instead="self.loop.fallbacks_used * (self.loop.model_call is not None), len(models) - 1",
        checker="failed_models_are_not_used_again",
        seed=33,
    ),
)
