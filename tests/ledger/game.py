"""Plays asks against the model and one or several product stores, whose results must agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import deepcopy
from dataclasses import fields
from datetime import datetime
from random import Random
from typing import Any

from pawl.chassis.ids import ConversationId, RunId, RunKey, StoreId, UserId
from pawl.job_store.ledger.reading import PendingFilter, RunFilter
from pawl.job_store.ledger.rules.rows import ConversationKey
from pawl.job_store.ledger.rules.slots import SlotLimits
from pawl.job_store.ledger.rules.states import WaitReason
from pawl.job_store.ledger.rules.waiting import Situation, explain
from pawl.values import CallState
from tests.ledger.commands import STORES, Chooser, Pick
from tests.ledger.model import LIMITS, Model, Row
from tests.ledger.product import Product, view_of_model, view_of_tables
from tests.ledger.stores import MemoryStore, Store
from tests.simulation import checkers
from tests.simulation.checkers import ENDED
from tests.simulation.history import History
from tests.simulation.record import Record
from tests.simulation.store import Tables
from tests.simulation.usage import usage_is_the_sum_of_runs_and_calls
from tests.unit.job_store.test_waiting import check as check_waiting

# Time between two asks, so that they are ordered.
TICK_SECONDS = 0.001

# The stores are compared completely after this many asks.
_COMPARED = 5

_STEPS = 60

_ANN = UserId("ann")
_PENDING = (
    PendingFilter(user_id=_ANN),
    PendingFilter(user_id=UserId("")),
    PendingFilter(
        user_id=_ANN,
        states=(CallState.OFFERED, CallState.ASKED),
        tool_name="tool",
        conversation_id=ConversationId("c1"),
    ),
)

_CHECKERS = (
    checkers.seqs_without_gaps,
    checkers.state_is_the_fold_of_the_log,
    checkers.state_changes_are_allowed,
    checkers.nothing_starts_after_a_cancel,
    usage_is_the_sum_of_runs_and_calls,
)


class Game:
    def __init__(self, model: Model, products: Sequence[Product], pick: Pick) -> None:
        self.model = model
        self.choose = Chooser(model, pick)
        self._products = products

    async def play(self, ask: Row) -> tuple[Any, ...]:
        await self._tick()
        answers = [await product.do(ask) for product in self._products]
        assert answers.count(answers[0]) == len(answers), ("the stores differ", ask, answers)
        if ask["do"] == "claim":
            ask["given"] = list(answers[0][1])
        agree(ask, self.model.do(ask), answers[0])
        await self.compare()
        return answers[0]

    async def together(self, asks: Sequence[Row]) -> None:
        """Play asks that share a transaction: the result equals that of separate asks in some order."""
        await self._tick()
        every = [await product.group(asks) for product in self._products]
        assert every.count(every[0]) == len(every), ("the stores differ", asks, every)
        await self.as_in_some_order(list(zip(asks, every[0], strict=True)))

    async def race(self, other: Product) -> None:
        """Play asks concurrently on two replicas of a store: the result equals that of separate asks in some order."""
        await self._tick()
        asks = self.choose.several(), self.choose.several()
        claims = [self.choose.claim(worker, 2) | {"partial": True} for worker in ("w1", "w2")]
        mine = self._products[0]
        *every, first, second = await asyncio.gather(
            mine.group(asks[0]), other.group(asks[1]), mine.do(claims[0]), other.do(claims[1])
        )
        for claim, answer in zip(claims, (first, second), strict=True):
            claim["given"] = list(answer[1])
        answers = [*every[0], *every[1], first, second]
        await self.as_in_some_order(list(zip((*asks[0], *asks[1], *claims), answers, strict=True)))

    async def as_in_some_order(self, answered: Sequence[tuple[Row, tuple[Any, ...]]]) -> None:
        store = self._products[0].store
        shown = view_of_tables(await store.tables(), await store.now())
        differences: list[AssertionError] = []
        for model in _orders(self.model, answered, differences):
            differing = _differing(shown, view_of_model(model))
            if not differing:
                self.model = self.choose.model = model
                return
            differences.append(AssertionError(differing))
        raise differences[0]

    async def compare(self) -> None:
        store = self._products[0].store
        tables, now = await store.tables(), await store.now()
        differing = _differing(view_of_tables(tables, now), view_of_model(self.model))
        assert not differing, differing
        _check_reasons(tables, now)

    async def compare_stores(self) -> None:
        stores = [product.store for product in self._products]
        first, *others = [(await store.tables(), store.announced.said, await self._reads(store)) for store in stores]
        for other in others:
            assert other == first, "the stores differ"

    async def _reads(self, store: Store) -> list[Any]:
        """Return the newest runs and the lists of all stores, as users and operators read them."""
        reads, found = store.reads, []
        for (store_name, run_id), run in list(self.model.runs.items())[-3:]:
            key = RunKey(StoreId(store_name), RunId(run_id))
            found += [await reads.run(key, UserId("")), await reads.commands(key)]
            found.append(await reads.calls(key, run["user"], after=None, rows_max=2))
            found.append(await reads.events(key, run["user"], after_seq=2, events_max=3))
            if run["worker"]:
                found.append(await reads.load(key, run["epoch"]))
            conversation_id = run["conversation"]
            user_id = self.model.conversations[store_name, conversation_id]["user"]
            found.append(await reads.messages(key.store_id, user_id, conversation_id, after=1, rows_max=2))
        for store_id in map(StoreId, sorted(set(STORES))):
            found += [await reads.pending(store_id, wanted, after=None, rows_max=3) for wanted in _PENDING]
            for oldest_first in (False, True):
                wanted = RunFilter(oldest_first=oldest_first)
                found.append(await reads.runs(store_id, _ANN, wanted, after=None, rows_max=3))
            found.append(await store.attention_repository.listed(store_id, run_id=RunId(""), after=None, rows_max=2))
        return found

    async def _tick(self) -> None:
        self.model.now = self.model.after(TICK_SECONDS)
        for product in self._products:
            await product.store.pass_time(TICK_SECONDS)

    # Moves.

    async def step(self) -> None:
        await self._see_to_work()
        await self.play(self.choose.commit())

    async def approvals(self) -> None:
        """Let several people decide one call, and let its owner continue with their decisions."""
        decide, show = self.choose.approval, self.choose.repeated_request
        await self._play_if_possible(decide, show, show, decide, decide, show, decide)

    async def agents(self) -> None:
        await self._play_if_possible(self.choose.delegating, self.choose.reported)

    async def _play_if_possible(self, *moves: Callable[[], Row | None]) -> None:
        for choose in moves:
            if (ask := choose()) is not None:
                await self.play(ask)

    async def deaths(self) -> None:
        for _ in range(3):
            await self.play(self.choose.wait(40.0))
            await self.play(self.choose.sweep_crashed())
            await self.play(self.choose.claim("w1", 3))

    async def group(self) -> None:
        await self.together(self.choose.several())

    async def _see_to_work(self) -> None:
        if all(run["state"] in ENDED for run in self.model.runs.values()):
            await self.play(self.choose.submit())
        if not any(run["worker"] for run in self.model.runs.values()):
            await self.play(self.choose.claim("w1", 2))

    async def settle(self) -> None:
        """I3: a correct owner can end its run, unless it has not read its commands."""
        ask = self.choose.settling_commit()
        run = self.model.runs[ask["store"], ask["run"]]
        may_end = run["worker"] and run["state"] not in ENDED
        if self.choose.pick([False, False, True]) and ask["consumed"]:
            ask["consumed"] = []
            may_end = False
        answer = await self.play(ask)
        assert answer[0] == "ok" or not may_end, answer

    async def end_all(self) -> None:
        """I3: correct owners end every run, whatever happened before."""
        runs = self.model.runs
        while still_open := [run for run in runs.values() if run["state"] not in ENDED]:
            for run in still_open:
                if run["state"] not in ENDED:
                    await self.play(self.choose.cancel(run))
            await self.play(self.choose.wait(100.0))
            # Runs that one more dead worker would quarantine are quarantined by now.
            await self.play(self.choose.sweep_crashed())
            for worker in ("w1", "w2", "w3"):
                await self.play(self.choose.claim(worker, 64))
            for run in [run for run in runs.values() if run["worker"]]:
                if run["worker"] and run["state"] not in ENDED:
                    answer = await self.play(self.choose.settling_commit(run))
                    assert answer[0] == "ok", answer

    async def check_logs(self) -> None:
        """I7, I12, I16, I17: the simulation's log checkers find nothing."""
        for product in self._products:
            tables = await product.store.tables()
            for store_id in map(StoreId, sorted(set(STORES))):
                record = Record(_part(tables, store_id), History())
                for checker in _CHECKERS:
                    found = list(checker(record))
                    assert not found, (checker.__name__, found)


def _plays(choose: Callable[[Chooser], Row]) -> Callable[[Game], Awaitable[object]]:
    return lambda game: game.play(choose(game.choose))


# Moves; a repeated entry is more likely.
MOVES: tuple[Callable[[Game], Awaitable[object]], ...] = (
    *[Game.step] * 8,
    *[_plays(Chooser.send)] * 6,
    *[Game.approvals] * 2,
    *[Game.agents] * 3,
    *[Game.group] * 4,
    *[_plays(Chooser.submit)] * 2,
    *[_plays(Chooser.share)] * 2,
    *[Game.settle] * 2,
    *[_plays(Chooser.of_worker)] * 3,
    *[_plays(Chooser.lease_offer)] * 2,
    _plays(Chooser.of_client),
    _plays(Chooser.wait),
    Game.deaths,
)


@asynccontextmanager
async def game(stores: Sequence[Store], pick: Pick) -> AsyncIterator[Game]:
    async with AsyncExitStack() as stack:
        commits = [await stack.enter_async_context(store.open()) for store in stores]
        products = [Product(store, commit) for store, commit in zip(stores, commits, strict=True)]
        played = Game(Model(stores[0].limits), products, pick)
        await played.play(played.choose.submit())
        await played.play(played.choose.claim("w1", 1))
        yield played


async def walk(stores: Sequence[Store], seed: int, steps: int) -> None:
    chance = Random(seed)
    async with game(stores, chance.choice) as played:
        for step in range(steps):
            await chance.choice(MOVES)(played)
            if step % _COMPARED == 0:
                await played.compare_stores()
        await played.end_all()
        await played.compare_stores()
        await played.check_logs()


def first_difference(seeds: Iterable[int]) -> str:
    """Play on the simulated store.

    Return the first difference between product and model, or an empty string if none is found.
    """
    for seed in seeds:
        try:
            asyncio.run(walk([MemoryStore(LIMITS[seed % len(LIMITS)])], seed, _STEPS))
        except AssertionError as difference:
            return f"seed {seed}: {str(difference).splitlines()[0][:300]}"
    return ""


def _differing(shown: Row, wanted: Row) -> list[tuple[Any, ...]]:
    """Return the table, key, product value and model value of each row that differs."""
    return [
        (name, key, shown[name].get(key), wanted[name].get(key))
        for name in wanted
        for key in sorted({*shown[name], *wanted[name]})
        if shown[name].get(key) != wanted[name].get(key)
    ]


def _check_reasons(tables: Tables, now: datetime) -> None:
    """I3: fail unless each run that makes no progress has a reason."""
    for run in tables.runs.values():
        conversation = tables.conversations[ConversationKey(run.store_id, run.conversation_id)]
        line = [each for each in (conversation.active_run_id, *conversation.queue) if each]
        waits = run.run_id in conversation.queue
        calls = [call for call in tables.calls.values() if call.run_id == run.run_id and not call.state.is_terminal]
        before = tuple(line[: line.index(run.run_id)]) if waits else ()
        situation = Situation(run=run, time=now, calls=calls, before=before)
        waiting = explain(situation, SlotLimits(per_store=9, per_user=9))
        check_waiting(situation, waiting)
        assert waiting is None or (waiting.reason is WaitReason.TURN) == waits
        assert waiting is None or bool(before) == waits


def _part(tables: Tables, store_id: str) -> Tables:
    every = {field.name: rows for field in fields(tables) if isinstance(rows := getattr(tables, field.name), dict)}
    parts: dict[str, Any] = {
        name: {
            key: row for key, row in rows.items() if (key[0] if isinstance(key, tuple) else key.store_id) == store_id
        }
        for name, rows in every.items()
    }
    return Tables(**parts)


def _orders(
    model: Model, answered: Sequence[tuple[Row, tuple[Any, ...]]], differences: list[AssertionError]
) -> Iterator[Model]:
    """Yield the model after each order of the asks that produces these answers.

    Add the reason why another order does not to `differences`.
    """
    if not answered:
        yield model
    for place, (ask, answer) in enumerate(answered):
        following = deepcopy(model)
        try:
            agree(ask, following.do(ask), answer)
        except AssertionError as difference:
            differences.append(difference)
        else:
            yield from _orders(following, [*answered[:place], *answered[place + 1 :]], differences)


def agree(ask: Row, wanted: tuple[Any, ...], answer: tuple[Any, ...]) -> None:
    """Fail unless the product gives the model's answer, or one of the reasons that the model allows."""
    if wanted[0] == "refused":
        assert answer[0] == "refused", (ask, wanted, answer)
        assert answer[1] in wanted[1], (ask, wanted, answer)
    else:
        assert answer == wanted, (ask, wanted, answer)
