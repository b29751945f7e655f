"""The reference model of workers and time: which runs a worker may claim, and which runs crash their workers."""

from __future__ import annotations

from typing import Any

from tests.ledger.model import Key, Model, Refusal, Row
from tests.simulation.checkers import ENDED

# How long a run waits after its worker released it because it could not drive it.
_REST_SECONDS = 2.0

# How long the last permitted worker of a run may take to return.
_GRACE_SECONDS = 5.0


def claim(model: Model, ask: Row) -> tuple[Any, ...]:
    """Check that the worker may have the `given` runs and that no other run was claimable.

    With `partial`, runs that concurrent writers have locked may be skipped.
    """
    given: list[Key] = ask["given"]
    due = {key: run for key, run in model.runs.items() if _is_due(model, run)}
    assert len(set(given)) == len(given) <= ask["runs_max"], given
    assert set(given) <= set(due), (given, sorted(due))
    was_active = {key for key, run in due.items() if is_active(run)}
    crashes = {key: _crashes(run) for key, run in due.items()}
    claimed_at = {key: run["claim_at"] for key, run in due.items()}
    for key in given:
        run = model.runs[key]
        run["crashes"] = crashes[key]
        run["epoch"] += 1
        run["worker"], run["claim_at"] = ask["worker"], model.after(ask["seconds"])
    _judge_limits(model, ask["worker"], given, was_active)
    if not ask["partial"]:
        fits = {key for key in due if key not in given and _fits(model, ask["worker"], due[key], key in was_active)}
        assert not fits or len(given) == ask["runs_max"], ("could be claimed too", fits)
        _judge_fairness(given, fits)
        for key in fits:
            rank = (key in was_active, crashes[key])
            younger = [
                other
                for other in given
                if (other[0], other in was_active, crashes[other]) == (key[0], *rank)
                and claimed_at[other] > claimed_at[key]
            ]
            assert not younger, ("is older", key, younger)
    return ("ok", {key: model.runs[key]["epoch"] for key in given})


def is_active(run: Row) -> bool:
    """Return whether a run uses a slot: it is running or being cancelled, or has a worker, alive or dead."""
    return bool(run["worker"]) or run["state"] in {"RUNNING", "CANCELLING"}


def _is_due(model: Model, run: Row) -> bool:
    if run["claim_at"] is None or run["claim_at"] > model.now:
        return False
    return not run["worker"] or _crashes(run) < model.limits["crashes"]


def _crashes(run: Row) -> int:
    """Return the number of crashes. If a due run has a worker, that worker has died and also counts."""
    return int(run["crashes"]) + bool(run["worker"])


def _active(model: Model, store: str, user: str = "") -> int:
    return sum(is_active(run) and run["store"] == store and user in {"", run["user"]} for run in model.runs.values())


def _last_chances(model: Model, worker: str) -> int:
    chances = model.limits["crashes"] - 1
    return sum(run["worker"] == worker and run["crashes"] >= chances for run in model.runs.values())


def _judge_limits(model: Model, worker: str, given: list[Key], was_active: set[Key]) -> None:
    """LOOP-14: an inactive run starts only with a free slot.

    I20: a worker holds at most one run that is on its last attempt.
    """
    for key in given:
        run = model.runs[key]
        if key not in was_active:
            assert _active(model, run["store"]) <= model.limits["per_store"], ("over the limit of the store", given)
            assert _active(model, run["store"], run["user"]) <= model.limits["per_user"], ("over the user's", given)
        if run["crashes"] + 1 >= model.limits["crashes"]:
            assert _last_chances(model, worker) <= 1, ("two runs that may kill the worker", given)


def _fits(model: Model, worker: str, run: Row, was_active: bool) -> bool:
    if _crashes(run) + 1 >= model.limits["crashes"] and _last_chances(model, worker):
        return False
    has_slot = _active(model, run["store"]) < model.limits["per_store"]
    return was_active or (has_slot and _active(model, run["store"], run["user"]) < model.limits["per_user"])


def _judge_fairness(given: list[Key], fits: set[Key]) -> None:
    """No store gets a second run before each store with due runs has got one."""
    got = {store: sum(key[0] == store for key in given) for store, _ in (*given, *fits)}
    for store in {key[0] for key in fits}:
        assert max(got.values()) <= got[store] + 1, ("a store got a second run before another got its first", got)


def renew(model: Model, ask: Row) -> tuple[Any, ...]:
    """Renew and return the runs that the worker holds, and those with unread commands."""
    held = {key: run for key, run in model.runs.items() if run["worker"] == ask["worker"]}
    for run in held.values():
        run["claim_at"] = model.after(ask["seconds"])
    with_commands = {key for key, run in held.items() if model.unread(run)}
    return ("ok", {key: run["epoch"] for key, run in held.items()}, with_commands)


def release(model: Model, ask: Row) -> tuple[Any, ...]:
    held = [run for run in model.runs.values() if run["worker"] == ask["worker"]]
    for run in held:
        run["worker"], run["claim_at"] = "", model.now
    return ("ok", len(held))


def report_crash(model: Model, ask: Row) -> tuple[Any, ...]:
    run = model.runs.get((ask["store"], ask["run"]))
    if run is None:
        raise Refusal("RUN_NOT_FOUND")
    if run["state"] in ENDED or run["epoch"] != ask["epoch"] or not run["worker"]:
        raise Refusal("LEASE_LOST", *(["RUN_ENDED"] if run["state"] in ENDED else []))
    return ("ok", _crash(model, run))


def sweep_crashed(model: Model, _: Row) -> tuple[Any, ...]:
    dead = [
        run
        for run in model.runs.values()
        if run["worker"]
        and model.now - run["claim_at"] >= round(_GRACE_SECONDS * 1000)
        and _crashes(run) >= model.limits["crashes"]
    ]
    return ("ok", sum(_crash(model, run) for run in dead))


def _crash(model: Model, run: Row) -> bool:
    run["crashes"] += 1
    run["worker"], run["claim_at"] = "", model.after(_REST_SECONDS)
    if run["crashes"] < model.limits["crashes"]:
        return False
    # Late writes of a worker that was only disconnected must be refused.
    run["epoch"] += 1
    run["claim_at"] = None
    model.move(run, "NEEDS_ATTENTION", "QUARANTINED")
    return True


def wait(model: Model, ask: Row) -> tuple[Any, ...]:
    model.now = model.after(ask["seconds"])
    return ("ok",)


ASKS = {
    "claim": claim,
    "renew": renew,
    "release": release,
    "report_crash": report_crash,
    "sweep_crashed": sweep_crashed,
    "wait": wait,
}
