"""A reference model of the ledger in plain dicts.

It was written from docs/design/architecture.md and the comments of pawl.job.v1, and shares no code with the product. It
prefers simplicity over speed: states are strings, times are numbers. An ask is a dict (see `commands.py`). An answer is
a tuple that starts with "ok" or "receipt", or with "refused" and all documented reasons, because the documents do not
order reasons that apply together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.simulation.checkers import ENDED, RUN_MOVES, SETTLED

Row = dict[str, Any]
Key = tuple[str, str]

# Queued runs of a conversation and of a store, active runs of a store and of a user, crashes of a run. Then, per run:
# unread messages, top-ups, bytes of messages, and receipts without effect. Last, other people whose messages enter a
# run.
LIMITS = (
    {
        "queue": 3,
        "store_queue": 5,
        "per_store": 3,
        "per_user": 2,
        "crashes": 3,
        "inbox": 2,
        "inbox_bytes": 100,
        "receipts": 1,
        "people": 4,
    },
    {
        "queue": 2,
        "store_queue": 3,
        "per_store": 1,
        "per_user": 1,
        "crashes": 3,
        "inbox": 9,
        "inbox_bytes": 7,
        "receipts": 9,
        "people": 1,
    },
    {
        "queue": 3,
        "store_queue": 100,
        "per_store": 20,
        "per_user": 20,
        "crashes": 3,
        "inbox": 3,
        "inbox_bytes": 9,
        "receipts": 0,
        "people": 2,
    },
)


class Refusal(Exception):
    """Raised to refuse an ask, which then changes nothing. `reasons` are all permitted reasons."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = frozenset(reasons)
        super().__init__(*reasons)


class Model:
    """Conversations, runs, calls, inboxes, leases, offers and logs of all stores.

    Times are in milliseconds. New ids derive from the `tag` of the ask that creates them.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.limits = limits
        self.now = 0
        self.conversations: dict[Key, Row] = {}
        self.runs: dict[Key, Row] = {}
        self.calls: dict[Key, Row] = {}
        self.requests: dict[tuple[str, str, str], Row] = {}
        self._tag = ""
        self._made: Counter[str] = Counter()

    def do(self, ask: Row) -> tuple[Any, ...]:
        """Answer an ask. A refused ask changes nothing."""
        # Imported here to avoid a cycle.
        from tests.ledger import model_commit, model_inbox, model_leases  # noqa: PLC0415

        methods = (
            {"submit": Model.submit, "share": Model.share} | model_commit.ASKS | model_inbox.ASKS | model_leases.ASKS
        )
        self._tag = ask["tag"]
        self._made.clear()
        try:
            # Each handler checks everything before it writes, so nothing needs a rollback.
            return methods[ask["do"]](self, ask)
        except Refusal as refusal:
            return ("refused", refusal.reasons)

    def after(self, seconds: float) -> int:
        return self.now + round(seconds * 1000)

    def new_id(self, prefix: str) -> str:
        self._made[prefix] += 1
        count = self._made[prefix]
        return f"{prefix}_{self._tag}" + (f"_{count}" if count > 1 else "")

    # A message of a user.

    def submit(self, ask: Row) -> tuple[Any, ...]:
        store, request = ask["store"], (ask["store"], ask["user"], ask["request"])
        if ask["request"] and request in self.requests:
            earlier = self.requests[request]
            if earlier["fingerprint"] != ask["fingerprint"]:
                raise Refusal("REQUEST_ID_REUSED")
            return ("ok", earlier["run"], earlier["steered"])
        found = self._conversation(ask)
        active = self.runs.get((store, found["active"])) if found else None
        policy = "CREATE" if active is None else ask["policy"]
        if active and policy in {"STEER", "INTERRUPT"} and active["user"] != ask["user"]:
            raise Refusal("RUN_OF_ANOTHER_USER")
        if policy == "STEER" and active is not None and active["cause"]:
            # A stopping run would lose the message.
            policy = "QUEUE"
        self._judge_submit(ask, found, policy)
        if policy == "STEER":
            self.judge_room(active or {}, ask)
        if policy == "STEER":
            assert active is not None
            run, steered = active, True
            self.enter(active, ask)
            self.post(active, self.new_id("cmd"), "steer")
            self.wake(active)
        else:
            run, steered = self._create(ask, found or self._new_conversation(ask), policy), False
            run["credential"], run["people"] = ask["credential"], ask["people"]
        if ask["request"]:
            row = {"fingerprint": ask["fingerprint"], "run": run["id"], "steered": steered}
            self.requests[request] = row
        return ("ok", run["id"], steered)

    def _conversation(self, ask: Row) -> Row | None:
        name = ask["conversation"]
        found = self.conversations.get((ask["store"], name))
        is_strange = found is not None and ask["user"] != found["user"] and found["sharing"] != "WRITE"
        if is_strange or (found is None and name and ask["must_exist"]):
            raise Refusal("CONVERSATION_NOT_FOUND")
        return found

    def _judge_submit(self, ask: Row, found: Row | None, policy: str) -> None:
        if policy == "REJECT":
            raise Refusal("CONVERSATION_BUSY")
        runs = [run for run in self.runs.values() if run["store"] == ask["store"]]
        active = [run for run in runs if run["worker"] or run["state"] in {"RUNNING", "CANCELLING"}]
        free = max(0, self.limits["per_store"] - len(active))
        # Runs that only wait for a worker do not block other runs.
        waiting = len([run for run in runs if run["state"] == "QUEUED" and not run["worker"]]) - free
        waits = len(found["queue"]) if found else 0
        is_writer = found is not None and found["user"] != ask["user"]
        most = (self.limits["queue"] + 1) // 2 if is_writer else self.limits["queue"]
        if policy != "STEER" and (waits >= most or waiting >= self.limits["store_queue"]):
            raise Refusal("QUEUE_FULL")

    def judge_room(self, run: Row, ask: Row) -> None:
        is_long = run["waiting_bytes"] + ask["bytes"] > self.limits["inbox_bytes"]
        others = set(ask["people"]) - {run["user"], *run["people"], *run["steered_by"]}
        is_one_more = others and len(others) + len(run["steered_by"]) > self.limits["people"]
        if run["waiting"] >= self.limits["inbox"] or is_long or is_one_more:
            raise Refusal("QUEUE_FULL")

    def enter(self, run: Row, ask: Row) -> None:
        run["waiting"] += 1
        run["waiting_bytes"] += ask["bytes"]
        run["steered_by"] |= set(ask["people"]) - {run["user"], *run["people"]}

    def _new_conversation(self, ask: Row) -> Row:
        return self._conversation_of(ask["store"], ask["user"], ask["conversation"] or self.new_id("conv"))

    def _conversation_of(self, store: str, user: str, name: str) -> Row:
        row: Row = {"store": store, "id": name, "user": user, "active": "", "queue": [], "messages": 0}
        row["interrupting"], row["sharing"] = [], "PRIVATE"
        self.conversations[store, name] = row
        return row

    def _new_run(self, conversation: Row, name: str, budget: int, ceiling: int) -> Row:
        run: Row = {
            "store": conversation["store"],
            "id": name,
            "conversation": conversation["id"],
            "user": conversation["user"],
            "state": "QUEUED",
            "waits": [],
            "cause": "",
            "attention": "",
            "crashes": 0,
            "epoch": 0,
            "worker": "",
            "claim_at": None,
            "had_turn": False,
            "budget": budget,
            "ceiling": ceiling,
            "parent": ("", ""),
            "waiting": 0,
            "waiting_bytes": 0,
            "unstopped": [],
            "log": ["run.queued"],
            "commands": {},
            "idle_receipts": 0,
            "last_step": None,
            "credential": "",
            "people": (),
            "steered_by": set(),
        }
        self.runs[run["store"], run["id"]] = run
        return run

    def delegate(self, parent: Row, call: str, name: str) -> None:
        """Create the child run of a call, with the same user and credential, in its own conversation."""
        conversation = self._conversation_of(parent["store"], parent["user"], self.new_id("conv"))
        run = self._new_run(conversation, name, 0, 0)
        run["parent"], run["credential"] = (parent["id"], call), parent["credential"]
        run["people"], run["steered_by"] = parent["people"], {*parent["steered_by"]}
        self._give_turn(run)

    def _create(self, ask: Row, conversation: Row, policy: str) -> Row:
        run = self._new_run(conversation, self.new_id("run"), ask["budget"], ask["ceiling"])
        run["user"] = ask["user"]
        if policy == "CREATE":
            self._give_turn(run)
        elif policy == "INTERRUPT":
            interrupting = [waiting for waiting in conversation["queue"] if waiting in conversation["interrupting"]]
            if ask["user"] == conversation["user"]:
                conversation["queue"].insert(len(interrupting), run["id"])
                conversation["interrupting"].append(run["id"])
            else:
                conversation["queue"].append(run["id"])
            active = self.runs[ask["store"], conversation["active"]]
            if active["state"] != "CANCELLING":
                self.post(active, self.new_id("cmd"), "cancel")
                self.stop(active, "SUPERSEDED")
        else:
            conversation["queue"].append(run["id"])
        return run

    def share(self, ask: Row) -> tuple[Any, ...]:
        """Set and return the sharing of a conversation.

        Users who lose write access lose their queued and active runs.
        """
        found = self.conversations.get((ask["store"], ask["conversation"]))
        if found is None or found["user"] != ask["user"]:
            raise Refusal("CONVERSATION_NOT_FOUND")
        found["sharing"] = ask["sharing"]
        names = [*found["queue"], found["active"]] if ask["sharing"] != "WRITE" else []
        for run in (self.runs[ask["store"], name] for name in names if name):
            if run["user"] != ask["user"] and run["state"] != "CANCELLING":
                self.post(run, self.new_id("cmd"), "cancel", user=ask["user"])
                self.stop(run, "USER")
        return ("ok", found["sharing"])

    # Turns, stops, ends.

    def _give_turn(self, run: Row) -> None:
        conversation = self.conversations[run["store"], run["conversation"]]
        conversation["active"] = run["id"]
        conversation["messages"] += 1
        run["had_turn"] = True
        run["claim_at"] = self.now
        run["log"].append("message.added")

    def wake(self, run: Row) -> None:
        """Make a run claimable if it is free, its turn has come and it is not quarantined."""
        is_due = run["claim_at"] is not None and run["claim_at"] <= self.now
        is_free = not run["worker"] and run["attention"] != "QUARANTINED"
        if is_free and run["had_turn"] and not is_due:
            run["claim_at"] = self.now

    def stop(self, run: Row, cause: str) -> None:
        """Stop a run. A run that has not started ends immediately, unless an unread message entered it."""
        run["cause"] = cause
        has_started = run["last_step"] is not None or run["worker"]
        steered = run["had_turn"] and any(command["kind"] == "steer" for command in self.unread(run).values())
        if not has_started and not steered:
            self.end(run, "CANCELLED")
            return
        if run["attention"] == "QUARANTINED":
            run["crashes"] = 0
        self.move(run, "CANCELLING")
        self.wake(run)

    def move(self, run: Row, state: str, attention: str = "") -> None:
        run["state"], run["waits"], run["attention"] = state, [], attention
        run["log"].append(f"run.{state.lower()}")

    def end(self, run: Row, state: str) -> None:
        if state not in RUN_MOVES[run["state"]].split():
            raise Refusal("ILLEGAL_TRANSITION")
        self.move(run, state)
        run["worker"], run["claim_at"] = "", None
        for command in run["commands"].values():
            command["unread"] = False
        conversation = self.conversations[run["store"], run["conversation"]]
        if conversation["active"] != run["id"]:
            conversation["queue"].remove(run["id"])
            return
        conversation["active"] = ""
        following = self.runs[run["store"], conversation["queue"].pop(0)] if conversation["queue"] else None
        if following:
            self._give_turn(following)
        self._report(run)
        if following and set(conversation["queue"]) & set(conversation["interrupting"]):
            self.stop(following, "SUPERSEDED")

    def _report(self, run: Row) -> None:
        """Report the end of the run to the run that called it, unless the call was cancelled."""
        parent, name = run["parent"]
        call = self.calls.get((run["store"], name))
        if call is not None and call["state"] == "DELEGATED":
            call["reserved"] = self.new_id("cmd")
            caller = self.runs[run["store"], parent]
            self.post(caller, call["reserved"], "agent_ended", call=name)
            caller["steered_by"] |= run["steered_by"]
            self.wake(caller)

    def give_up(self, store: str, name: str) -> None:
        run = self.runs[store, name]
        if run["state"] not in ENDED and run["state"] != "CANCELLING":
            self.post(run, self.new_id("cmd"), "cancel")
            self.stop(run, "PARENT")

    # Queries.

    def unread(self, run: Row) -> dict[str, Row]:
        """Return the accepted commands that the owner has not yet consumed, in order of arrival."""
        return {name: command for name, command in run["commands"].items() if command["unread"]}

    def post(self, run: Row, name: str, kind: str, **more: Any) -> None:
        """Store a command with its receipt. An accepted command is unread."""
        row: Row = {"kind": kind, "call": "", "outcome": "ACCEPTED", "reason": "", "unread": True, "fingerprint": ""}
        row["user"] = run["user"]
        run["commands"][name] = row | more

    def post_idle(self, run: Row, name: str, kind: str, **more: Any) -> None:
        """Store the receipt of a command that changed nothing, unless the run already has too many such receipts."""
        if run["idle_receipts"] < self.limits["receipts"]:
            run["idle_receipts"] += 1
            self.post(run, name, kind, unread=False, **more)

    def open_calls(self, run: Row) -> list[Row]:
        return [
            call
            for call in self.calls.values()
            if (call["store"], call["run"]) == (run["store"], run["id"]) and call["state"] not in SETTLED
        ]

    def is_stopping(self, run: Row) -> bool:
        return bool(run["cause"]) and run["state"] not in ENDED
