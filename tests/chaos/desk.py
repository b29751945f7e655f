"""Actions of users on pending calls and unwanted runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.event.v1 import call_pb2, run_pb2
from tests.chaos.caller import Caller, settled
from tests.chaos.effects import EffectFile
from tests.chaos.front_ends import FrontEnd
from tests.chaos.history import Kind, Operation
from tests.simulation.record import call_state, run_state

_PATIENCE_SECONDS = 8.0
_GRANTS = 0.8


class Desk:
    def __init__(self, caller: Caller, front_end: FrontEnd, effects: EffectFile) -> None:
        self._caller = caller
        self._draw = caller.draw
        self._front_end = front_end
        self._effects = effects
        self._handled: dict[tuple[str, str], float] = {}

    async def see(self, run: run_pb2.Run, *, calm: bool) -> None:
        for call in run.pending_calls:
            key, now = (call.call_id, call_state(call.state)), time.monotonic()
            handled_at = self._handled.get(key)
            if handled_at is not None and now - handled_at < _PATIENCE_SECONDS:
                continue
            if self._draw.random() < 0.3:
                continue
            self._handled[key] = now
            match call_state(call.state):
                case "AWAITING_APPROVAL" | "ASKED":
                    rivals = 2 if self._draw.random() < 0.15 else 1
                    await asyncio.gather(*(self._decide(call) for _ in range(rivals)))
                case "OFFERED" if calm or self._draw.random() < 0.15:
                    await self._return(call)
                case "RUNNING" if run_state(run.state) == "NEEDS_ATTENTION":
                    await self._resolve(call)
                case _:
                    pass

    async def cancel(self, run_id: str, kind: Kind = Kind.CANCEL) -> None:
        operation = self._caller.invoke(kind, self._caller.next_id("cancel"), run_id=run_id)
        request = agent_pb2.CancelRunRequest(request_id=operation.request_id, run_id=run_id, reason="changed my mind")
        await self._perhaps_twice(lambda: self._caller.ask(operation, "CancelRun", request))

    async def _decide(self, call: call_pb2.Call) -> None:
        operation, decision = self._answer(call) if call_state(call.state) == "ASKED" else self._verdict(call)
        if self._draw.random() < 0.2:
            await settled(self._front_end.ask(operation, decision=decision))
            return
        request = agent_pb2.DecideRequest(request_id=operation.request_id, run_id=call.run_id, decision=decision)
        await self._perhaps_twice(lambda: self._caller.ask(operation, "Decide", request))

    def _answer(self, call: call_pb2.Call) -> tuple[Operation, types_pb2.CallDecision]:
        answer = self._caller.next_id("answer")
        decision = types_pb2.CallDecision(
            run_id=call.run_id, call_id=call.call_id, kind=call_pb2.DECISION_KIND_ANSWER, answer=answer
        )
        return self._operation(Kind.ANSWER, call, answer), decision

    def _verdict(self, call: call_pb2.Call) -> tuple[Operation, types_pb2.CallDecision]:
        kind = self._draw.choices((Kind.APPROVE, Kind.EDIT, Kind.REJECT), (60, 20, 20))[0]
        arguments = json.loads(call.arguments_json)
        decision = types_pb2.CallDecision(
            run_id=call.run_id,
            call_id=call.call_id,
            kind=call_pb2.DecisionKind.Value(f"DECISION_KIND_{kind.name}"),
            digest=call.approval.digest if self._draw.random() < 0.95 else "0" * 64,
        )
        series = call.approval.series
        if kind is Kind.APPROVE and series.digest and self._draw.random() < _GRANTS:
            decision.digest, decision.for_series = series.digest, True
            content = json.dumps(arguments, sort_keys=True)
            return self._operation(kind, call, content, series=str(series.iterations_max)), decision
        if kind is Kind.EDIT:
            arguments["tag"] = self._caller.next_id("edited")
            decision.arguments_json = json.dumps(arguments).encode()
        return self._operation(kind, call, json.dumps(arguments, sort_keys=True)), decision

    async def _return(self, call: call_pb2.Call) -> None:
        """Send the result of a front-end call without a stream, perhaps while a front end does so too."""
        operation = self._operation(Kind.RESULT, call, json.dumps(self._caller.next_id("by-hand")))
        await self._perhaps_twice(lambda: self._front_end.submit(operation))

    async def _resolve(self, call: call_pb2.Call) -> None:
        """Resolve a call as an operator: check outside whether its effect happened, and report it."""
        happened = any(effect.key == call.call_id for effect in self._effects.happened())
        content = json.dumps(self._caller.next_id("found")) if happened else ""
        operation = self._operation(Kind.RESOLVE, call, content)
        request = agent_pb2.ResolveCallRequest(
            request_id=operation.request_id,
            run_id=call.run_id,
            call_id=call.call_id,
            resolution=agent_pb2.RESOLUTION_HAPPENED if happened else agent_pb2.RESOLUTION_TELL_MODEL,
            content_json=content.encode(),
        )
        await self._perhaps_twice(lambda: self._caller.ask(operation, "ResolveCall", request))

    def _operation(self, kind: Kind, call: call_pb2.Call, content: str, **about: str) -> Operation:
        about |= {"run_id": call.run_id, "call_id": call.call_id, "content": content}
        return self._caller.invoke(kind, self._caller.next_id(kind), **about)

    async def _perhaps_twice(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Send a request, sometimes twice concurrently with the same request id."""
        await settled(*(ask() for _ in range(2 if self._draw.random() < 0.15 else 1)))
