"""Random ledger requests ("asks"): mostly valid, often not.

An ask is a dict of strings and numbers. `Chooser` draws one from the model's state, so valid, late, repeated and
unauthorised requests all occur. `operations` translates it for the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.ledger.model import Model, Row
from tests.simulation.checkers import CALL_MOVES, ENDED, RUN_MOVES, SETTLED

STORES = ("acme", "acme", "acme", "beta")
USERS = ("ann", "ann", "ann", "bob")
# An unknown user, the local user that everyone shares, and two known users.
CREDENTIALS = ("", "local", "key_1", "key_1", "key_2")
PEOPLE: Sequence[tuple[str, ...]] = ((), (), (), ("olga",), ("cyd", "olga"), ("eve",))
WORKERS = ("w1", "w2")
CLIENTS = ("tab_1", "tab_2")
SESSIONS = ("ses_1", "ses_2")
DIGESTS = ("ab" * 32, "cd" * 32)
ARGUMENTS = ("{}", '{"n":1}')
LEASE_SECONDS = 30.0
CALLS = ("a", "b", "c")
# A child run has a longer id than its caller.
_LONG = 40
_WAITING = ("AWAITING_APPROVAL", "AWAITING_APPROVAL", "OFFERED", "ASKED")
_COMMANDS = {
    "AWAITING_APPROVAL": ["decide"],
    "ASKED": ["decide"],
    "OFFERED": ["result", "progress"],
    "RUNNING": ["resolve"],
}

Pick = Callable[[Sequence[Any]], Any]


class Chooser:
    def __init__(self, model: Model, pick: Pick) -> None:
        self.model = model
        self.pick = pick
        self._count = 0

    def _ask(self, what: str, **more: Any) -> Row:
        self._count += 1
        return {"do": what, "tag": f"{self._count:06}"} | more

    def submit(self) -> Row:
        budget = self.pick([0, 0, 100])
        return self._ask(
            "submit",
            store=self.pick(STORES),
            user=self.pick(USERS),
            conversation=self.pick(["c1", "c1", "c2", ""]),
            must_exist=bool(self.model.runs) and self.pick([False, False, False, True]),
            policy=self.pick(["QUEUE", "STEER", "INTERRUPT", "REJECT"]),
            request=self.pick(["", "", "r1", "r2"]),
            fingerprint=self.pick(["f1", "f1", "f1", "f2"]),
            bytes=self.pick([1, 1, 3]),
            credential=self.pick(CREDENTIALS),
            people=self.pick(PEOPLE),
            budget=budget,
            ceiling=self.pick([0, 150]) if budget else 0,
            limits=self.model.limits,
        )

    def share(self) -> Row:
        found = self.pick(list(self.model.conversations.values()))
        # Usually the opposite of the current state.
        others = ["READ", "PRIVATE"] if found["sharing"] == "WRITE" else ["WRITE", "WRITE"]
        return self._ask(
            "share",
            store=found["store"],
            user=self.pick([found["user"]] * 5 + ["bob"]),
            conversation=found["id"],
            sharing=self.pick([*others, "WRITE"]),
        )

    def commit(self) -> Row:
        run, model = self._run(), self.model
        earlier = run["last_step"]["id"] if run["last_step"] else ""
        fresh = self._step()
        state = self.pick(
            [*[""] * 4, *RUN_MOVES.get(run["state"], "").split(), *self._now_and_then(["WAITING", "COMPLETED"])]
        )
        unread = list(model.unread(run))
        call_changes = self._call_changes(run)
        entered = self.pick([[], [], [1], [1, 3]])
        begun = {
            call_change["call"]: call_change["child"]
            for call_change in call_changes
            if call_change["state"] == "DELEGATED"
        }
        return self._ask(
            "commit",
            store=run["store"],
            run=run["id"],
            epoch=max(0, run["epoch"] - self.pick([0] * 19 + [1])),
            commit=self.pick([fresh] * 16 + [earlier or fresh, "step_000000"]),
            events=self.pick([[], ["output.delta"], ["round.started"], ["output.delta", "round.started", "warning"]]),
            messages=len(entered) + self.pick([0, 0, 1]),
            entered=entered,
            calls=call_changes,
            delegations=self.pick([begun] * 9 + [{}]),
            state=state,
            waits=self.pick([[1], [1], [1, 2], [2, 9], []]),
            failure=self.pick([True, True, True, False]) if state == "FAILED" else False,
            cause=self.pick(["USER", "USER", ""]) if state in {"CANCELLED", "CANCELLING"} else "",
            unstopped=self.pick([[], [], [], ["a"], ["a", "b"]]),
            consumed=self.pick([unread, unread, unread, unread, unread, [], unread[:1], ["cmd_absent"]]),
            lease=self.pick(["KEEP", "KEEP", "KEEP", "PARK", "RELEASE"]),
            wake=self.pick([10.0, None]),
            after_seq=self.pick([None] * 12 + [len(run["log"]), len(run["log"]) + 1]),
            # Input and output tokens, those of child runs, and the model.
            usage=self.pick([(), (5, 3, 0, "m1"), (9, 1, 2, "m1"), (9, 4, 2, "m2")]),
        )

    def settling_commit(self, run: Row | None = None) -> Row:
        run = run or self._run()
        call_changes = [
            self._as_it_is(call) | {"state": "CANCELLED" if call["state"] == "DELEGATED" else "FAILED"}
            for call in self.model.open_calls(run)
        ]
        return self._ask(
            "commit",
            store=run["store"],
            run=run["id"],
            epoch=run["epoch"],
            commit=self._step(),
            events=["output.delta"],
            messages=1,
            entered=[],
            calls=[call_change | {"has_result": True} for call_change in call_changes],
            delegations={},
            state="FAILED",
            waits=[],
            failure=True,
            cause="",
            unstopped=[],
            consumed=list(self.model.unread(run)),
            lease="KEEP",
            wake=None,
            after_seq=None,
            usage=(),
        )

    def send(self) -> Row:
        run = self._run_in_need()
        name, call = self._call_of(run)
        fitting = _COMMANDS.get(call["state"], [])
        if run["attention"]:
            fitting = ["redrive", "cancel", *fitting]
        kind = self.pick([*fitting * 4, "decide", "result", "steer", "progress", "resolve", "cancel", "top_up"])
        client = self.pick(["", call["client"], *CLIENTS]) if kind == "result" else self.pick([call["client"], "tab_1"])
        edits = self.pick(["APPROVE", "APPROVE", "EDIT", "REJECT", "ANSWER"])
        of_operator = kind == "redrive" or (kind in {"resolve", "cancel"} and self.pick([False, True]))
        user = self.pick([run["user"]] * 9 + ["bob"])
        if kind == "decide" and self.pick([False, True]):
            user = self.pick(["cyd", "dan", "eve"])
        fresh = f"cmd{self._count}"
        return self._ask(
            "send",
            store=self.pick([run["store"]] * 9 + ["beta"]),
            run=run["id"],
            user="olga" if of_operator else user,
            credential=self.pick(CREDENTIALS),
            people=self.pick(PEOPLE),
            right=self.pick(["STORE", "STORE", "STORE", "OWN_RUNS", "QUESTIONS"]),
            operator=of_operator,
            command=self.pick([fresh, fresh, fresh, "cmd_again", "cmd_more"]),
            fingerprint=self.pick(["f1", "f1", "f1", "f2"]),
            kind=kind,
            tokens=self.pick([10, 50]),
            bytes=self.pick([1, 1, 3]),
            limits=self.model.limits,
            call="" if kind in {"cancel", "steer", "redrive", "top_up"} else name,
            client=(client or "tab_2") if kind == "progress" else client,
            session=self.pick(["", *SESSIONS]) if kind in {"result", "progress"} else "",
            offer_epoch=max(0, call["offer_epoch"] - self.pick([0, 0, 0, 1])),
            decision=edits,
            digest=self.pick([call["digest"], call["digest"], call["digest"], "", DIGESTS[1]]),
            arguments=ARGUMENTS[1] if edits == "EDIT" else "",
            edited_digest=DIGESTS[1] if edits == "EDIT" else "",
        )

    def approval(self) -> Row | None:
        call = self._gated()
        if call is None:
            return None
        decision = self.pick(["APPROVE", "APPROVE", "APPROVE", "APPROVE", "EDIT", "REJECT"])
        edits = decision == "EDIT"
        return self._ask(
            "send",
            store=call["store"],
            run=call["run"],
            user=self.pick(["cyd", "dan", "eve", call["user"]]),
            credential=self.pick(CREDENTIALS),
            people=self.pick(PEOPLE),
            right="STORE",
            operator=False,
            command=f"cmd{self._count}",
            fingerprint="f1",
            kind="decide",
            call=call["id"],
            decision=decision,
            digest=call["digest"],
            arguments=ARGUMENTS[1] if edits else "",
            edited_digest=DIGESTS[1] if edits else "",
            limits=self.model.limits,
        )

    def repeated_request(self) -> Row | None:
        """Return a step that shows an edited or escalated approval request again, or None if no request is pending."""
        call = self._gated()
        run = self.model.runs[call["store"], call["run"]] if call else None
        if call is None or run is None or not run["worker"]:
            return None
        call_change = self._as_it_is(call) | {"state": "AWAITING_APPROVAL", "escalated": True, "has_result": False}
        if call["decision"] == "EDIT":
            call_change["digest"], call_change["arguments"] = call["approved"]
        ask = self.settling_commit(run) | {"state": "", "messages": 0, "calls": [call_change], "failure": False}
        reserved = call["reserved"]
        return ask | {"consumed": [reserved] if reserved in self.model.unread(run) else []}

    def delegating(self) -> Row | None:
        """Return a step that delegates a call and waits for its child run, or None if no call can be delegated."""
        every = [run for run in self.model.runs.values() if run["worker"] and run["state"] == "RUNNING"]
        free = [(run, f"{run['id']}_{name}") for run in every for name in CALLS if len(run["id"]) < _LONG]
        free = [(run, name) for run, name in free if (run["store"], name) not in self.model.calls]
        if not free:
            return None
        run, name = self.pick(free)
        call_change = self._new() | {"call": name, "state": "DELEGATED", "child": f"run_{name}", "digest": ""}
        ask = self.settling_commit(run) | {"state": "WAITING", "waits": [9], "failure": False, "messages": 1}
        return ask | {"calls": [call_change], "delegations": {name: f"run_{name}"}, "consumed": [], "lease": "PARK"}

    def reported(self) -> Row | None:
        calls = [call for call in self.model.calls.values() if call["state"] == "DELEGATED"]
        runs = self.model.runs
        calls = [call for call in calls if runs[call["store"], call["run"]]["worker"]]
        if not calls:
            return None
        call = self.pick([call for call in calls if call["reserved"]] or calls)
        run = runs[call["store"], call["run"]]
        state = self.pick(["SUCCEEDED", "FAILED", "CANCELLED"])
        call_change = self._as_it_is(call) | {"state": state, "has_result": True}
        ask = self.settling_commit(run) | {"state": "", "failure": False, "messages": 0, "calls": [call_change]}
        return ask | {"consumed": [call["reserved"]] if call["reserved"] in self.model.unread(run) else []}

    def _gated(self) -> Row | None:
        runs = self.model.runs
        waiting = [call for call in self.model.calls.values() if call["state"] == "AWAITING_APPROVAL"]
        waiting = [call for call in waiting if runs[call["store"], call["run"]]["state"] not in ENDED]
        several = [call for call in waiting if call["required"] > 1]
        chosen: Row | None = self.pick(several or waiting or [None])
        return chosen

    def lease_offer(self) -> Row:
        offered = [call for call in self.model.calls.values() if call["state"] == "OFFERED"]
        call = self.pick(self.pick([offered, offered, []]) or [None])
        run = self._run() if call is None else self.model.runs[call["store"], call["run"]]
        return self._ask(
            "lease_offer",
            store=run["store"],
            run=run["id"],
            user=self.pick([run["user"], run["user"], run["user"], "bob"]),
            call=self._call_of(run)[0] if call is None else call["id"],
            client=self.pick(CLIENTS),
            session=self.pick(SESSIONS),
            seconds=LEASE_SECONDS,
        )

    def of_client(self) -> Row:
        return self._ask(
            self.pick(["renew_offers", "release_offers", "sweep_offers"]),
            store=self.pick(STORES),
            user=self.pick(USERS),
            client=self.pick(CLIENTS),
            session=self.pick(SESSIONS),
            run=self.pick(["", self._run()["id"]]),
            seconds=LEASE_SECONDS,
        )

    def of_worker(self) -> Row:
        what = self.pick(["claim", "claim", "renew", "release", "release", "report_crash", "sweep_crashed"])
        if what == "report_crash":
            run = self._run()
            epoch = max(0, run["epoch"] - self.pick([0] * 5 + [1]))
            return self._ask(what, store=run["store"], run=run["id"], epoch=epoch, limits=self.model.limits)
        return self.claim(self.pick(WORKERS), self.pick([3, 1])) | {"do": what}

    def claim(self, worker: str, runs_max: int) -> Row:
        limits = self.model.limits
        return self._ask(
            "claim", worker=worker, runs_max=runs_max, seconds=LEASE_SECONDS, partial=False, given=[], limits=limits
        )

    def sweep_crashed(self) -> Row:
        return self._ask("sweep_crashed")

    def several(self) -> list[Row]:
        kinds = [self.submit, self.submit, self.share, self.commit, self.commit, self.send, self.lease_offer]
        return [self.pick(kinds)() for _ in range(self.pick([2, 3]))]

    def wait(self, seconds: float = 0.0) -> Row:
        """Return a wait of `seconds`, or of a random time that may be shorter or longer than a lease."""
        return self._ask("wait", seconds=seconds or self.pick([1.0, 1.0, 20.0, 20.0, 100.0]))

    def cancel(self, run: Row) -> Row:
        fresh = f"cmd{self._count}"
        who = {"store": run["store"], "run": run["id"], "user": run["user"], "operator": False, "right": "OWN_RUNS"}
        more = {"fingerprint": "f1", "limits": self.model.limits}
        return self._ask("send", kind="cancel", call="", command=fresh, **more, **who)

    def _step(self) -> str:
        return f"step_{self._count:06}"

    def _run(self) -> Row:
        """Return a run, usually one that a worker holds."""
        every = list(self.model.runs.values())
        is_open = [run for run in every if run["state"] not in ENDED]
        held = [run for run in is_open if run["worker"]]
        chosen: Row = self.pick(self.pick([held, held, held, held, is_open, every]) or is_open or every)
        return chosen

    def _run_in_need(self) -> Row:
        """Return a run, usually one that waits for a person."""
        calls = [call for call in self.model.calls.values() if call["state"] in _COMMANDS]
        waits = [self.model.runs[call["store"], call["run"]] for call in calls]
        needy = [run for run in self.model.runs.values() if run["attention"]]
        chosen: Row = self.pick(self.pick([waits, waits, needy, []]) or [self._run()])
        return chosen

    def _now_and_then(self, things: list[str]) -> list[str]:
        return things if self.pick([False] * 11 + [True]) else []

    def _call_of(self, run: Row) -> tuple[str, Row]:
        """Return a call of the run, usually one that is open; sometimes an unknown call or a call of another run."""
        calls = [row for row in self.model.calls.values() if (row["store"], row["run"]) == (run["store"], run["id"])]
        calls.sort(key=lambda call: call["state"] in SETTLED)
        waiting = [call["id"] for call in calls if call["state"] in _COMMANDS]
        strange = [row["id"] for row in self.model.calls.values()] + ["absent"]
        name = self.pick(self.pick([waiting, waiting, waiting, [call["id"] for call in calls], strange]) or strange)
        nothing = {"state": "", "client": "", "offer_epoch": 0, "digest": "", "arguments": ""}
        return name, self.model.calls.get((run["store"], name), nothing)

    def _call_changes(self, run: Row) -> list[Row]:
        if self.pick([True, False, False]):
            return []
        names = self.pick([["a"], ["b"], ["a", "b"], ["c", "a"]])
        call_changes = [self._call_change(run, f"{run['id']}_{name}") for name in names]
        strange = self._now_and_then([row["id"] for row in self.model.calls.values() if row["run"] != run["id"]])
        return call_changes + ([self._call_change(run, strange[0])] if strange else [])

    def _call_change(self, run: Row, name: str) -> Row:
        call = self.model.calls.get((run["store"], name))
        if call is None:
            state = self.pick([*_WAITING, *CALL_MOVES[""].split(), *self._now_and_then(["SUCCEEDED"])])
            gated = state == "AWAITING_APPROVAL" or self.pick([False, False, False, True])
            call_change = self._new() | {"digest": DIGESTS[0] if gated else "", "fallback": self.pick(["", "other"])}
        else:
            state = self.pick(CALL_MOVES.get(call["state"], "SUCCEEDED RUNNING").split())
            call_change = self._as_it_is(call)
            if call["approved"] is not None and self.pick([True, True, False]):
                call_change["digest"], call_change["arguments"] = call["approved"]
            if call["state"] == "OFFERED" and call["fallback"] and self.pick([False, True]):
                call_change["tool"], call_change["digest"] = call["fallback"], ""
            if self.pick([False] * 9 + [True]):
                call_change[self.pick(["digest", "arguments", "tool"])] = "ef" * 32
            call_change["attempt"] = call["attempt"] + self.pick([1, 1, 0])
            if state == "AWAITING_APPROVAL" != call["state"]:
                call_change["digest"] = self.pick([DIGESTS[0], DIGESTS[0], DIGESTS[1], ""])
        if state == "DELEGATED":
            call_change["child"] = f"run_{name}"
        if self.pick([False] * 19 + [True]):
            call_change["child"] = self.pick(["", run["id"], "run_other"])
        ended = state in SETTLED
        has_result = ended if self.pick([True] * 15 + [False]) else not ended
        call_change |= {"required": self.pick([1, 1, 2, 3]), "escalated": self.pick([True, False])}
        call_change["default"] = self.pick([False, False, True])
        return call_change | {
            "call": name,
            "state": state,
            "has_result": has_result,
            "deadline": self.pick([None, 50.0]),
        }

    def _new(self) -> Row:
        call_change: Row = {
            "tool": "tool",
            "arguments": ARGUMENTS[0],
            "digest": "",
            "attempt": 1,
            "fallback": "",
            "child": "",
        }
        return call_change | {
            "required": 1,
            "escalated": False,
            "default": False,
            "has_result": False,
            "deadline": None,
        }

    def _as_it_is(self, call: Row) -> Row:
        kept = ("tool", "fallback", "arguments", "digest", "attempt", "child")
        more = {"required": call["required"], "escalated": call["escalated"], "default": False}
        return {name: call[name] for name in kept} | more | {"call": call["id"], "deadline": None}
