"""What may be asked of the ledger, drawn at random: mostly what fits, and often what does not.

An ask is a dict of words and numbers. `Chooser` draws one with the model's state
in view, so that right answers, late ones, doubled ones and ones of strangers all
come up; `operation` puts it into the words of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from pawl.event.v1 import run_pb2

from services.job_store.domain.attention import ReportCrash
from services.job_store.domain.calls import CallChange
from services.job_store.domain.command import (
    Cancel,
    Command,
    Decide,
    Progress,
    Redrive,
    Resolve,
    Send,
    Steer,
    ToolResult,
    TopUp,
)
from services.job_store.domain.commit import Commit, NewMessage
from services.job_store.domain.events import OwnerEvent
from services.job_store.domain.offers import LeaseOffer
from services.job_store.domain.states import (
    ActiveRunPolicy,
    CallState,
    DecisionKind,
    DecisionRight,
    LeaseAction,
    RunState,
    StopCause,
)
from services.job_store.domain.submit import Submit
from tests.ledger.model import Model, Row
from tests.simulation.reference import CALL_MOVES, ENDED, RUN_MOVES, SETTLED
from tests.unit.job_store.world import change, submission

STORES = ("acme", "acme", "acme", "beta")
USERS = ("ann", "ann", "ann", "bob")
WORKERS = ("w1", "w2")
CLIENTS = ("tab_1", "tab_2")
DIGESTS = ("ab" * 32, "cd" * 32)
ARGUMENTS = ("{}", '{"n":1}')
LEASE_SECONDS = 30.0
_CALLS = ("a", "b", "c")
_WAITING = ("AWAITING_APPROVAL", "AWAITING_APPROVAL", "OFFERED", "ASKED")
_COMMANDS = {
    "AWAITING_APPROVAL": ["decide"],
    "ASKED": ["decide"],
    "OFFERED": ["result", "progress"],
    "RUNNING": ["resolve"],
}
_FAILURE = run_pb2.Run(failure=run_pb2.RunFailure(message="It failed.")).SerializeToString()

Pick = Callable[[Sequence[Any]], Any]


class Chooser:
    """Draws asks; `pick` takes one of several things. What it names is named by a number that grows."""

    def __init__(self, model: Model, pick: Pick) -> None:
        self.model = model
        self.pick = pick
        self._count = 0

    def _ask(self, what: str, **more: Any) -> Row:
        self._count += 1
        return {"do": what, "tag": f"{self._count:06}"} | more

    def submit(self) -> Row:
        """A message of a user."""
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
            budget=budget,
            ceiling=self.pick([0, 150]) if budget else 0,
            limits=self.model.limits,
        )

    def commit(self) -> Row:
        """A step of a worker: of the owner, or of one that was, or of nobody."""
        run, model = self._run(), self.model
        earlier = run["last_step"]["id"] if run["last_step"] else ""
        fresh = self._step()
        state = self.pick(
            [*[""] * 4, *RUN_MOVES.get(run["state"], "").split(), *self._now_and_then(["WAITING", "COMPLETED"])]
        )
        unread = list(model.unread(run))
        return self._ask(
            "commit",
            store=run["store"],
            run=run["id"],
            epoch=max(0, run["epoch"] - self.pick([0] * 19 + [1])),
            commit=self.pick([fresh] * 16 + [earlier or fresh, "step_000000"]),
            events=self.pick([[], ["output.delta"], ["round.started"], ["output.delta", "round.started", "warning"]]),
            messages=self.pick([0, 0, 1, 2]),
            calls=self._wishes(run),
            state=state,
            waits=self.pick([[1], [1], [1, 2], []]),
            failure=self.pick([True, True, True, False]) if state == "FAILED" else False,
            cause=self.pick(["USER", "USER", ""]) if state in {"CANCELLED", "CANCELLING"} else "",
            unstopped=self.pick([[], [], [], ["a"], ["a", "b"]]),
            consumed=self.pick([unread, unread, unread, unread, unread, [], unread[:1], ["cmd_absent"]]),
            lease=self.pick(["KEEP", "KEEP", "KEEP", "PARK", "RELEASE"]),
            wake=self.pick([10.0, None]),
            after_seq=self.pick([None] * 12 + [len(run["log"]), len(run["log"]) + 1]),
        )

    def settling_commit(self, run: Row | None = None) -> Row:
        """The step of an owner that does everything right and ends its run."""
        run = run or self._run()
        wishes = [self._as_it_is(call) | {"state": "FAILED"} for call in self.model.open_calls(run)]
        return self._ask(
            "commit",
            store=run["store"],
            run=run["id"],
            epoch=run["epoch"],
            commit=self._step(),
            events=["output.delta"],
            messages=1,
            calls=[wish | {"has_result": True} for wish in wishes],
            state="FAILED",
            waits=[],
            failure=True,
            cause="",
            unstopped=[],
            consumed=list(self.model.unread(run)),
            lease="KEEP",
            wake=None,
            after_seq=None,
        )

    def send(self) -> Row:
        """A command of somebody to a run."""
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
            right=self.pick(["STORE", "STORE", "STORE", "OWN_RUNS", "QUESTIONS"]),
            operator=of_operator,
            command=self.pick([fresh, fresh, fresh, "cmd_again", "cmd_more"]),
            fingerprint=self.pick(["f1", "f1", "f1", "f2"]),
            kind=kind,
            tokens=self.pick([10, 50]),
            call="" if kind in {"cancel", "steer", "redrive", "top_up"} else name,
            client=(client or "tab_2") if kind == "progress" else client,
            offer_epoch=max(0, call["offer_epoch"] - self.pick([0, 0, 0, 1])),
            decision=edits,
            digest=self.pick([call["digest"], call["digest"], call["digest"], "", DIGESTS[1]]),
            arguments=ARGUMENTS[1] if edits == "EDIT" else "",
            edited_digest=DIGESTS[1] if edits == "EDIT" else "",
        )

    def approval(self) -> Row | None:
        """Somebody who may approve decides a call that waits for that; None if none does."""
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
        )

    def shown_again(self) -> Row | None:
        """The step of an owner that shows a request again: as it was edited, or escalated; None if none waits."""
        call = self._gated()
        run = self.model.runs[call["store"], call["run"]] if call else None
        if call is None or run is None or not run["worker"]:
            return None
        wish = self._as_it_is(call) | {"state": "AWAITING_APPROVAL", "escalated": True, "has_result": False}
        if call["decision"] == "EDIT":
            wish["digest"], wish["arguments"] = call["approved"]
        ask = self.settling_commit(run) | {"state": "", "messages": 0, "calls": [wish], "failure": False}
        reserved = call["reserved"]
        return ask | {"consumed": [reserved] if reserved in self.model.unread(run) else []}

    def _gated(self) -> Row | None:
        runs = self.model.runs
        waiting = [call for call in self.model.calls.values() if call["state"] == "AWAITING_APPROVAL"]
        waiting = [call for call in waiting if runs[call["store"], call["run"]]["state"] not in ENDED]
        several = [call for call in waiting if call["required"] > 1]
        chosen: Row | None = self.pick(several or waiting or [None])
        return chosen

    def lease_offer(self) -> Row:
        """A client wants to run a call."""
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
            seconds=LEASE_SECONDS,
        )

    def of_client(self) -> Row:
        """What a client, or the sweep, does to all offers."""
        return self._ask(
            self.pick(["renew_offers", "release_offers", "sweep_offers"]),
            store=self.pick(STORES),
            user=self.pick(USERS),
            client=self.pick(CLIENTS),
            run=self.pick(["", self._run()["id"]]),
            seconds=LEASE_SECONDS,
        )

    def of_worker(self) -> Row:
        """What a worker does to its leases."""
        what = self.pick(["claim", "claim", "renew", "release", "release", "report_crash", "sweep_crashed"])
        if what == "report_crash":
            run = self._run()
            epoch = max(0, run["epoch"] - self.pick([0] * 5 + [1]))
            return self._ask(what, store=run["store"], run=run["id"], epoch=epoch, limits=self.model.limits)
        return self.claim(self.pick(WORKERS), self.pick([3, 1])) | {"do": what}

    def claim(self, worker: str, runs_max: int) -> Row:
        """A worker wants runs."""
        limits = self.model.limits
        return self._ask(
            "claim", worker=worker, runs_max=runs_max, seconds=LEASE_SECONDS, partial=False, given=[], limits=limits
        )

    def sweep_crashed(self) -> Row:
        """The ledger looks for runs that no worker survives."""
        return self._ask("sweep_crashed")

    def several(self) -> list[Row]:
        """Asks of the moment that share a transaction."""
        kinds = [self.submit, self.commit, self.send, self.lease_offer]
        return [self.pick(kinds)() for _ in range(self.pick([2, 3]))]

    def wait(self, seconds: float = 0.0) -> Row:
        """Time passes: less than any lease, or more."""
        return self._ask("wait", seconds=seconds or self.pick([1.0, 1.0, 20.0, 20.0, 100.0]))

    def cancel(self, run: Row) -> Row:
        """The user of a run stops it."""
        fresh = f"cmd{self._count}"
        who = {"store": run["store"], "run": run["id"], "user": run["user"], "operator": False, "right": "OWN_RUNS"}
        return self._ask("send", kind="cancel", call="", command=fresh, fingerprint="f1", **who)

    def _step(self) -> str:
        return f"step_{self._count:06}"

    def _run(self) -> Row:
        """A run: mostly one that a worker holds."""
        every = list(self.model.runs.values())
        is_open = [run for run in every if run["state"] not in ENDED]
        held = [run for run in is_open if run["worker"]]
        chosen: Row = self.pick(self.pick([held, held, held, held, is_open, every]) or is_open or every)
        return chosen

    def _run_in_need(self) -> Row:
        """A run: mostly one that waits for somebody."""
        calls = [call for call in self.model.calls.values() if call["state"] in _COMMANDS]
        waits = [self.model.runs[call["store"], call["run"]] for call in calls]
        needy = [run for run in self.model.runs.values() if run["attention"]]
        chosen: Row = self.pick(self.pick([waits, waits, needy, []]) or [self._run()])
        return chosen

    def _now_and_then(self, things: list[str]) -> list[str]:
        return things if self.pick([False] * 11 + [True]) else []

    def _call_of(self, run: Row) -> tuple[str, Row]:
        """A call of a run, open ones first; now and then an absent one, or one of another run."""
        calls = [row for row in self.model.calls.values() if (row["store"], row["run"]) == (run["store"], run["id"])]
        calls.sort(key=lambda call: call["state"] in SETTLED)
        waiting = [call["id"] for call in calls if call["state"] in _COMMANDS]
        strange = [row["id"] for row in self.model.calls.values()] + ["absent"]
        name = self.pick(self.pick([waiting, waiting, waiting, [call["id"] for call in calls], strange]) or strange)
        nothing = {"state": "", "client": "", "offer_epoch": 0, "digest": "", "arguments": ""}
        return name, self.model.calls.get((run["store"], name), nothing)

    def _wishes(self, run: Row) -> list[Row]:
        if self.pick([True, False, False]):
            return []
        names = self.pick([["a"], ["b"], ["a", "b"], ["c", "a"]])
        wishes = [self._wish(run, f"{run['id']}_{name}") for name in names]
        strange = self._now_and_then([row["id"] for row in self.model.calls.values() if row["run"] != run["id"]])
        return wishes + ([self._wish(run, strange[0])] if strange else [])

    def _wish(self, run: Row, name: str) -> Row:
        call = self.model.calls.get((run["store"], name))
        if call is None:
            state = self.pick([*_WAITING, *CALL_MOVES[""].split(), *self._now_and_then(["SUCCEEDED"])])
            gated = state == "AWAITING_APPROVAL" or self.pick([False, False, False, True])
            wish: Row = {"tool": "tool", "arguments": ARGUMENTS[0], "digest": DIGESTS[0] if gated else "", "attempt": 1}
            wish["fallback"] = self.pick(["", "other"])
        else:
            state = self.pick(CALL_MOVES.get(call["state"], "SUCCEEDED RUNNING").split())
            wish = self._as_it_is(call)
            if call["approved"] is not None and self.pick([True, True, False]):
                wish["digest"], wish["arguments"] = call["approved"]
            if call["state"] == "OFFERED" and call["fallback"] and self.pick([False, True]):
                wish["tool"], wish["digest"] = call["fallback"], ""
            if self.pick([False] * 9 + [True]):
                wish[self.pick(["digest", "arguments", "tool"])] = "ef" * 32
            wish["attempt"] = call["attempt"] + self.pick([1, 1, 0])
            if state == "AWAITING_APPROVAL" != call["state"]:
                wish["digest"] = self.pick([DIGESTS[0], DIGESTS[0], DIGESTS[1], ""])
        ended = state in SETTLED
        has_result = ended if self.pick([True] * 15 + [False]) else not ended
        wish |= {"required": self.pick([1, 1, 2, 3]), "escalated": self.pick([True, False])}
        wish["default"] = self.pick([False, False, True])
        return wish | {"call": name, "state": state, "has_result": has_result, "deadline": self.pick([None, 50.0])}

    def _as_it_is(self, call: Row) -> Row:
        kept = ("tool", "fallback", "arguments", "digest", "attempt")
        more = {"required": call["required"], "escalated": call["escalated"], "default": False}
        return {name: call[name] for name in kept} | more | {"call": call["id"], "deadline": None}


def operation(ask: Row, now: datetime) -> Any:
    """Return what the product does for an ask; None if it is not an operation of the group commit."""
    match ask["do"]:
        case "submit":
            return _submit(ask)
        case "commit":
            return _commit(ask, now)
        case "send":
            return Send(
                store_id=ask["store"],
                run_id=ask["run"],
                user_id=ask["user"],
                command_id=ask["command"],
                fingerprint=ask["fingerprint"].encode(),
                command=_command(ask),
                payload=b"payload",
                as_operator=ask["operator"],
            )
        case "report_crash":
            return ReportCrash(
                store_id=ask["store"],
                run_id=ask["run"],
                epoch=ask["epoch"],
                crashes_max=ask["limits"]["crashes"],
            )
        case "lease_offer":
            return LeaseOffer(
                store_id=ask["store"],
                user_id=ask["user"],
                run_id=ask["run"],
                call_id=ask["call"],
                client_id=ask["client"],
                lease_seconds=ask["seconds"],
            )
        case _:
            return None


def _submit(ask: Row) -> Submit:
    return submission(
        ActiveRunPolicy[ask["policy"]],
        store_id=ask["store"],
        user_id=ask["user"],
        request_id=ask["request"],
        fingerprint=ask["fingerprint"].encode(),
        conversation_id=ask["conversation"],
        conversation_must_exist=ask["must_exist"],
        message=b"",
        steer=b"",
        interrupt=b"",
        queue_max=ask["limits"]["queue"],
        store_queue_max=ask["limits"]["store_queue"],
        token_budget=ask["budget"],
        token_ceiling=ask["ceiling"],
    )


def _commit(ask: Row, now: datetime) -> Commit:
    return Commit(
        store_id=ask["store"],
        run_id=ask["run"],
        epoch=ask["epoch"],
        commit_id=ask["commit"],
        events=tuple(OwnerEvent(type=kind, body=b"") for kind in ask["events"]),
        messages=(NewMessage(message_id="", summarised_to=0, body=b""),) * ask["messages"],
        calls=tuple(_change(wish, now) for wish in ask["calls"]),
        state=RunState[ask["state"]] if ask["state"] else None,
        waits=tuple(ask["waits"]) if ask["state"] == "WAITING" else (),
        failure=_FAILURE if ask["failure"] else None,
        output=run_pb2.Run(output_text=ask["commit"]).SerializeToString() if ask["state"] in ENDED else None,
        stop_cause=StopCause[ask["cause"]] if ask["cause"] else None,
        loop_state=ask["commit"].encode(),
        consumed=tuple(ask["consumed"]),
        lease=LeaseAction[ask["lease"]],
        wake_time=None if ask["wake"] is None else now + timedelta(seconds=ask["wake"]),
        after_seq=ask["after_seq"],
        unstopped=_unstopped(ask["unstopped"]),
    )


def _unstopped(call_ids: list[str]) -> bytes | None:
    return run_pb2.Run(unstopped_call_ids=call_ids).SerializeToString() if call_ids else None


def _change(wish: Row, now: datetime) -> CallChange:
    deadline = None if wish["deadline"] is None else now + timedelta(seconds=wish["deadline"])
    return change(
        wish["call"],
        CallState[wish["state"]],
        index=_CALLS.index(wish["call"][-1]),
        tool_name=wish["tool"],
        fallback_tool_name=wish["fallback"],
        arguments=wish["arguments"].encode(),
        attempt=wish["attempt"],
        digest=wish["digest"],
        deadline_time=deadline,
        result=b"" if wish["has_result"] else None,
        approvals_required=wish["required"],
        escalated=wish["escalated"],
        has_default=wish["default"],
    )


def _command(ask: Row) -> Command:
    match ask["kind"]:
        case "decide":
            return Decide(
                call_id=ask["call"],
                kind=DecisionKind[ask["decision"]],
                digest=ask["digest"],
                arguments=ask["arguments"].encode(),
                edited_digest=ask["edited_digest"],
                reason="",
                right=DecisionRight[ask["right"]],
            )
        case "result":
            return ToolResult(call_id=ask["call"], client_id=ask["client"], offer_epoch=ask["offer_epoch"])
        case "progress":
            return Progress(
                call_id=ask["call"],
                client_id=ask["client"],
                offer_epoch=ask["offer_epoch"],
                fraction=None,
                message="",
            )
        case "resolve":
            return Resolve(call_id=ask["call"])
        case "cancel":
            return Cancel(cause=StopCause.OPERATOR if ask["operator"] else StopCause.USER)
        case "redrive":
            return Redrive()
        case "top_up":
            return TopUp(tokens=ask["tokens"])
        case _:
            return Steer()
