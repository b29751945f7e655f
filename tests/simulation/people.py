"""Users who send messages, decide, answer, change their minds and repeat requests, and other users who interfere."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from pawl.agent.v1 import operator_pb2
from pawl.agent.v1.agent_pb2 import SendMessageRequest, StartRunRequest
from pawl.agent.v1.types_pb2 import CallDecision, ToolResult
from pawl.agent_loop.api.messages import NO_SESSION, SessionTools
from pawl.agent_loop.api.replies import Reply, is_taken
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules.options import AskedOptions
from pawl.agent_loop.loop.rules.run import ApprovalExpiryPolicy, BatchOrder, TokenBudgetPolicy, UnknownOutcomePolicy
from pawl.chassis.identity import auth
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, ClientId, CommandId, ConversationId, RequestId, RunId, RunKey, StoreId, UserId
from pawl.errors import ConversationBusy, ConversationNotFound, PawlError, QueueFull, RunOfAnotherUser
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.tool.v1 import tool_pb2
from pawl.values import ENDED, CallResolution, CallState, CommandOutcome, DecisionKind, MessagePolicy
from tests.simulation import grants
from tests.simulation.cluster import AgentLoop
from tests.simulation.flows import DESIGNER
from tests.simulation.history import Message, Sent
from tests.simulation.model import MODELS
from tests.simulation.network import Network
from tests.simulation.registry import FRONT_END, OWN, TOOLS
from tests.simulation.world import Member, World

STORE = StoreId("store")
SETTLING_SECONDS = 600.0
_OPERATORS = "/pawl.agent.v1.OperatorService"
_OTHER_USER = Principal(store_id=STORE, user_id=UserId("stranger"), roles=frozenset())
_SKETCH = tool_pb2.ToolDefinition(name=OWN, description="Sketch it.").SerializeToString()
_BRINGS = 0.25
_POLICIES = (MessagePolicy.QUEUE, MessagePolicy.STEER, MessagePolicy.INTERRUPT, MessagePolicy.REJECT)


class User:
    """A person with one conversation. Without `front_end`, they send results of front-end calls as unary requests."""

    def __init__(self, world: World, name: str, *, front_end: bool) -> None:
        self.world = world
        self.name = name
        self.caller = Principal(store_id=STORE, user_id=UserId(name), roles=frozenset({"operator", "approver"}))
        self.run_ids: dict[str, None] = {}
        self.ended: set[str] = set()
        self.draw = world.chance.stream("user", name)
        self.budget_draw = world.chance.stream("budget", name)
        self.gate = world.chance.stream("approvals", name)
        self.bag = world.chance.stream("own tools", name)
        self.models = world.chance.stream("models", name)
        self.breaks = world.chance.stream("pauses", name)
        self.paused: set[str] = set()
        self.network = Network(world.chance, world.history, name)
        self._stops = world.chance.stream("stops", name)
        self._stop_numbers = itertools.count(1)
        self.conversation_id = f"conv_{name}"
        self.done = False
        self.result_padding = 0
        self._has_front_end = front_end
        self._attention = self.draw.choice([0.05, 0.5, 0.9])
        # Some top up a budget before it is used up, even while the model writes.
        self._generosity = self.budget_draw.choice([0.03, 0.03, 0.8])
        self._handled: set[tuple[str, int]] = set()
        self._count = 0

    async def live(self) -> None:
        more = self.draw.choice([0, 1, 2, 3])
        await asyncio.sleep(8.0 * self.draw.random() ** 2)
        await self.send_message(MessagePolicy.QUEUE)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0.3 + 2.0 * self.draw.random())
            if more and not self.world.chance.calm and self.draw.random() < 0.3:
                more -= 1
                await self.send_message(self.draw.choice(_POLICIES))
            await self._tend()
            is_done = self.world.chance.calm and not self._finds_more() and len(self.ended) == len(self.run_ids)
            if is_done or loop.time() > 1000.0 + SETTLING_SECONDS:
                break
        self.done = True

    async def send_message(self, policy: MessagePolicy, *, padding: int = 0) -> None:
        self._count += 1
        name = f"{self.name}x{self._count}"
        message = Message(
            user_id=self.name,
            request_id=f"req_{name}",
            conversation_id=self.conversation_id,
            text=f"plan-{name} please" + "." * padding,
            plan=name,
            policy=policy.name,
        )
        self.world.history.messages.append(message)
        model, *fallbacks = self.models.choice([("",), ("",), ("",), ("",), MODELS[:2], MODELS])
        asked = AskedOptions(
            model=model,
            model_fallbacks=tuple(fallbacks),
            tool_names=tuple(sorted(self.draw.sample(list(TOOLS), self.draw.randrange(2, len(TOOLS) + 1)))),
            batch_order=self.draw.choice(list(BatchOrder)),
            unknown_outcome_policy=self.draw.choice(list(UnknownOutcomePolicy)),
            limits=budget_limits(self.budget_draw),
            token_budget_policy=TokenBudgetPolicy.FAIL if self.budget_draw.random() < 0.3 else TokenBudgetPolicy.WAIT,
            approvals_required=self.gate.choice([0, 0, 2]),
            approval_expiry_policy=self.gate.choice(list(ApprovalExpiryPolicy)),
        )
        times = 2 if self.draw.random() < 0.15 else 1
        session = _session_tools(self.bag, f"cli_{self.name}")
        # A steering message may start a run if none is active.
        message.tool_count = 0 if policy is MessagePolicy.STEER else len(session.definitions)
        await asyncio.gather(*(self._submit(message, asked, policy, session) for _ in range(times)))

    async def _submit(
        self, message: Message, asked: AskedOptions, policy: MessagePolicy, session: SessionTools
    ) -> None:
        count, conversation_id = self._count, self.conversation_id

        async def work(agent: AgentLoop) -> run_pb2.Run:
            messages = agent.clients.messages
            said = {"text": message.text, "options": wire.ASKED.fields(asked), "policy": policy.value}
            if policy is MessagePolicy.STEER:
                steer = SendMessageRequest(**said, conversation_id=conversation_id)
                sent = await messages.send(self.caller, RequestId(message.request_id), steer)
                message.steered = sent.steered
                return sent.run
            start = StartRunRequest(**said, conversation_id=conversation_id if count > 1 else "")
            return await messages.start(self.caller, RequestId(message.request_id), start, session)

        try:
            run = await self.world.insist(self.network, self.draw, "submit", work)
        except (ConversationBusy, QueueFull, ConversationNotFound, RunOfAnotherUser) as error:
            self.world.history.tell(f"{message.request_id} refused: {error.reason}")
            return
        message.run_ids.append(run.run_id)
        self.conversation_id = message.conversation_id = run.conversation_id
        self.run_ids[run.run_id] = None

    def _finds_more(self) -> bool:
        known = len(self.run_ids)
        for run in self.world.tables.runs.values():
            is_turn = run.is_turn and run.conversation_id == self.conversation_id
            is_job = run.reports_to != "" and run.reports_to == self.conversation_id
            if run.user_id == self.name and (is_turn or is_job):
                self.run_ids.setdefault(run.run_id)
        return len(self.run_ids) > known

    async def _tend(self) -> None:
        self._finds_more()
        for run_id in [run_id for run_id in self.run_ids if run_id not in self.ended]:
            run = await self._read(run_id)
            if run.state in ENDED:
                self.ended.add(run_id)
                if self.draw.random() < 0.1:
                    await self._cancel(run_id)
                continue
            for call in run.pending_calls:
                await self._see(run, call)
            await self._pay(run)
            if run.reports_to_conversation_id:
                await self._pause_or_resume(run_id)
                await self._stop_by_model(run)
            if not self.world.chance.calm and self.draw.random() < 0.04:
                await self._cancel(run_id)

    async def _read(self, run_id: str) -> run_pb2.Run:
        return await self.world.insist(
            self.network, self.draw, "get_run", lambda agent: agent.ledger.get_run(self.caller, RunId(run_id))
        )

    async def _see(self, run: run_pb2.Run, call: call_pb2.Call) -> None:
        calm = self.world.chance.calm
        key = (call.call_id, call.state)
        is_offered = call.tool_name in (*FRONT_END, OWN) and call.state == call_pb2.CALL_STATE_OFFERED
        if (
            (key in self._handled and (not calm or self.draw.random() < 0.5))
            or (not calm and self.draw.random() > self._attention)
            or (is_offered and not self._answers_itself(call))
        ):
            return
        self._handled.add(key)
        times = 2 if self.draw.random() < 0.15 else 1
        command_id = f"cmd_{self.name}_{self._next()}"
        # agent-loop checks who may resolve a call; these requests bypass it.
        if self.draw.random() < 0.1 and call.state != call_pb2.CALL_STATE_RUNNING:
            await self._respond(_OTHER_USER, run, call, f"cmd_stranger_{self._next()}")
        await asyncio.gather(*(self._respond(self.caller, run, call, command_id) for _ in range(times)))
        if not calm and self.draw.random() < 0.06:
            await self._cancel(run.run_id)
        if self.draw.random() < 0.1:
            await self._respond(self.caller, run, call, f"cmd_{self.name}_{self._next()}")

    def _answers_itself(self, call: call_pb2.Call) -> bool:
        """Return whether the user sends the result without a stream, even if a front end may also send one."""
        if not self._has_front_end:
            return True
        is_unclaimed = self.world.chance.calm and not call.offer.client_id
        return self.draw.random() < (0.3 if is_unclaimed else 0.1)

    def _next(self) -> int:
        self._count += 1
        return self._count

    async def _respond(self, caller: Principal, run: run_pb2.Run, call: call_pb2.Call, command_id: str) -> None:
        responses = {
            CallState.AWAITING_APPROVAL: self._decide,
            CallState.ASKED: self._answer,
            CallState.OFFERED: self._return,
            CallState.RUNNING: self._resolve,
        }
        if (respond := responses.get(CallState(call.state))) is not None:
            await respond(caller, call, command_id)

    async def _decide(self, caller: Principal, call: call_pb2.Call, command_id: str) -> None:
        draw = self.world.chance.stream("decision", command_id)
        arguments = call.arguments_json
        kind = draw.choice([DecisionKind.APPROVE, DecisionKind.APPROVE, DecisionKind.EDIT, DecisionKind.REJECT])
        digest = call.approval.digest if draw.random() < 0.95 else "0" * 64
        edited = msgspec.json.encode({"n": 1000 + draw.randrange(100)}) if kind is DecisionKind.EDIT else b""
        series_decision = grants.grant_decision(self.world.chance, command_id, call.approval, kind)
        decision = CallDecision(
            run_id=call.run_id,
            call_id=call.call_id,
            kind=call_pb2.DecisionKind.Value(f"DECISION_KIND_{kind.name}"),
            digest=series_decision.digest if series_decision else digest,
            arguments_json=edited,
            for_series=series_decision is not None,
            edited_series=wire.SERIES.write(series_decision.edited)
            if series_decision and series_decision.edited
            else None,
        )
        sent = self._sent(caller, command_id, call.run_id, kind.name, call_id=call.call_id, content=edited or arguments)
        sent.grants = grants.granted(call.run_id, edited or arguments, self.world.journal.version, series_decision)
        await self._send(sent, lambda agent: agent.clients.inbox.decide(caller, RequestId(command_id), decision))

    async def _answer(self, caller: Principal, call: call_pb2.Call, command_id: str) -> None:
        draw = self.world.chance.stream("decision", command_id)
        kind = draw.choice([DecisionKind.ANSWER, DecisionKind.ANSWER, DecisionKind.REJECT])
        answer = f"answer {command_id}" if kind is DecisionKind.ANSWER else ""
        decision = CallDecision(
            run_id=call.run_id,
            call_id=call.call_id,
            kind=call_pb2.DecisionKind.Value(f"DECISION_KIND_{kind.name}"),
            answer=answer,
        )
        sent = self._sent(caller, command_id, call.run_id, kind.name, call_id=call.call_id, content=answer.encode())
        await self._send(sent, lambda agent: agent.clients.inbox.decide(caller, RequestId(command_id), decision))

    async def _return(self, caller: Principal, call: call_pb2.Call, command_id: str) -> None:
        content = msgspec.json.encode(f"result {command_id}" + "." * self.result_padding)
        result = ToolResult(
            run_id=call.run_id, call_id=call.call_id, content_json=content, is_error=False, offer_epoch=0
        )
        sent = self._sent(caller, command_id, call.run_id, "RESULT", call_id=call.call_id, content=content)
        await self._send(
            sent,
            lambda agent: agent.clients.inbox.submit_result(caller, RequestId(command_id), result),
        )

    async def resolve(self, call: call_pb2.Call) -> None:
        """Report the outcome of a call whose outcome is unknown."""
        await self._resolve(self.caller, call, f"cmd_{self.name}_{self._next()}")

    async def _resolve(self, caller: Principal, call: call_pb2.Call, command_id: str) -> None:
        resolution = self.world.chance.stream("decision", command_id).choice(list(CallResolution))
        content = msgspec.json.encode(f"it happened {command_id}") if resolution is CallResolution.HAPPENED else b""
        sent = self._sent(caller, command_id, call.run_id, resolution.name, call_id=call.call_id, content=content)
        await self._send(
            sent,
            lambda agent: agent.clients.inbox.resolve(
                caller,
                RequestId(command_id),
                run_id=RunId(call.run_id),
                call_id=CallId(call.call_id),
                resolution=ledger_pb2.CallResolution.Value(f"CALL_RESOLUTION_{resolution.name}"),
                content_json=content,
            ),
        )

    async def _pay(self, run: run_pb2.Run) -> None:
        """Top up a run, usually because it waits for tokens. Some users refuse."""
        waits = run_pb2.WAIT_KIND_BUDGET in run.waits
        if not run.token_budget or self.budget_draw.random() > (0.4 if waits else self._generosity):
            return
        command_id, tokens = f"top_{self.name}_{self._next()}", self.budget_draw.choice([1, 200, 1500])
        if self.budget_draw.random() < 0.1:
            await self._top_up(_OTHER_USER, run.run_id, f"{command_id}_stranger", tokens)
        times = 2 if self.budget_draw.random() < 0.2 else 1
        await asyncio.gather(*(self._top_up(self.caller, run.run_id, command_id, tokens) for _ in range(times)))

    async def _top_up(self, caller: Principal, run_id: str, command_id: str, tokens: int) -> None:
        sent = self._sent(caller, command_id, run_id, "TOP_UP", tokens=tokens)
        await self._send(
            sent, lambda agent: agent.clients.inbox.top_up(caller, RequestId(command_id), RunId(run_id), tokens)
        )

    async def _pause_or_resume(self, job_id: str) -> None:
        """Pause or resume a job at random. Once the simulation is calm, only resume it."""
        resumes = job_id in self.paused
        rests = self.breaks.random() > (0.3 if resumes else 0.15)
        if not resumes if self.world.chance.calm else rests:
            return
        command_id = f"pause_{self.name}_{self._next()}"
        sent = self._sent(self.caller, command_id, job_id, "RESUME" if resumes else "PAUSE")
        request_id = RequestId(sent.command_id)
        await self._send(
            sent,
            lambda agent: agent.clients.inbox.pause(self.caller, request_id, RunId(job_id), resumes=resumes),
        )
        (self.paused.discard if resumes and sent.taken else self.paused.add)(job_id)

    async def _cancel(self, run_id: str) -> None:
        command_id = f"cmd_{self.name}_{self._next()}"
        await self._send(
            self._sent(self.caller, command_id, run_id, "CANCEL"),
            lambda agent: agent.clients.inbox.cancel(self.caller, RequestId(command_id), RunId(run_id), ""),
        )

    async def _stop_by_model(self, job: run_pb2.Run) -> None:
        """Stop a job, either as the model of the run that started it or as a model of its conversation."""
        if self._stops.random() > 0.05 or not job.parent_run_id:
            return
        starter = self.world.tables.runs[RunKey(STORE, RunId(job.parent_run_id))]
        is_starter = self._stops.random() < 0.4
        conversation_id = starter.conversation_id if is_starter else ConversationId(job.reports_to_conversation_id)
        stopper = starter.run_id if is_starter or not job.above else RunId(job.above[0].run_id)
        command_id, key = CommandId(f"stop_{self.name}_{next(self._stop_numbers)}"), RunKey(STORE, RunId(job.run_id))
        sent = self._sent(self.caller, command_id, job.run_id, "CANCEL", content=stopper.encode())

        async def stop(agent: AgentLoop) -> Any:
            return await agent.reads.stop_job(key, UserId(self.name), conversation_id, stopper, command_id)

        try:
            found = await self.world.insist(self.network, self._stops, "stop_job", stop)
        except PawlError as error:
            sent.outcomes.append(error.reason)
        else:
            sent.outcomes.append("ACCEPTED" if found is not None and found[1] else "LATE")

    def _sent(
        self,
        caller: Principal,
        command_id: str,
        run_id: str,
        kind: str,
        *,
        call_id: str = "",
        content: bytes = b"",
        tokens: int = 0,
    ) -> Sent:
        """Return the command with this id, which is new unless it is repeated."""
        commands = self.world.history.commands
        sent = next((each for each in commands if each.command_id == command_id), None)
        if sent is None:
            sent = Sent(
                user_id=caller.user_id,
                command_id=command_id,
                run_id=run_id,
                kind=kind,
                call_id=call_id,
                content=content,
                tokens=tokens,
                sent_at=asyncio.get_running_loop().time(),
            )
            commands.append(sent)
        return sent

    async def _send(self, sent: Sent, work: Callable[[AgentLoop], Awaitable[Reply]]) -> None:
        try:
            reply = await self.world.insist(self.network, self.draw, sent.kind, work)
        except PawlError as error:
            sent.outcomes.append(error.reason)
            return
        outcome = CommandOutcome(reply.outcome).name
        sent.outcomes.append(outcome)
        self.world.history.tell(f"receipt {sent.command_id} {sent.kind} {outcome}")
        if is_taken(reply) and sent.accepted_at is None:
            sent.accepted_at = asyncio.get_running_loop().time()


class Approver(User):
    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, front_end=False)
        self.caller = Principal(store_id=STORE, user_id=UserId(name), roles=frozenset({"approver"}))

    async def live(self) -> None:
        wanted = ledger_pb2.ListPendingCallsRequest(of_all_users=True, page_size=50)
        while True:
            await asyncio.sleep(0.5 + 4.0 * self.draw.random())
            page = await self.world.insist(
                self.network,
                self.draw,
                "list_pending",
                lambda agent: agent.ledger.list_pending(self.caller, wanted),
            )
            for call in page.calls:
                if self.world.chance.calm or self.draw.random() < self._attention:
                    await self._decide(self.caller, call, f"cmd_{self.name}_{self._next()}")


class Operator(Member):
    """Ends or redrives quarantined runs, and resolves the calls of workflow runs, whose user cannot."""

    def __init__(self, world: World) -> None:
        super().__init__(world, STORE, "operator", "operator")
        self._resolver = User(world, "resolver", front_end=False)
        self._count = 0

    async def live(self) -> None:
        while True:
            await asyncio.sleep(5.0 * self._draw.random())
            listed = await self._ask(
                "list_attention", lambda agent: agent.ledger.forward(self._caller, f"{_OPERATORS}/ListAttention", b"")
            )
            for run in operator_pb2.ListAttentionResponse.FromString(listed).runs:
                if run.attention.reason == run_pb2.ATTENTION_REASON_QUARANTINED:
                    await self._resolve_quarantine(run.run_id)
                elif run.user_id == DESIGNER:
                    for call in run.calls:
                        await self._resolver.resolve(call)

    async def _resolve_quarantine(self, run_id: str) -> None:
        self._count += 1
        command_id = f"cmd_operator_{self._count}"
        fields = {"request_id": command_id, "run_id": run_id, "reason": "seen to"}
        what = "EndRun" if self._draw.random() < 0.2 else "RedriveRun"
        request = getattr(operator_pb2, f"{what}Request")(**fields)

        async def act(agent: AgentLoop) -> Any:
            auth.set_principal(self._caller)
            return await getattr(agent.clients.operators, what)(request, None)

        await self._ask(what, act)


def _session_tools(draw: random.Random, own_client_id: str) -> SessionTools:
    """Return the tools of a run: usually none, otherwise one for any client, the user's client or an absent client."""
    if draw.random() >= _BRINGS:
        return NO_SESSION
    client_id = draw.choice(["", own_client_id, own_client_id, "cli_elsewhere"])
    return SessionTools(client_id=ClientId(client_id), definitions=(_SKETCH,))


def budget_limits(draw: random.Random) -> dict[str, float]:
    if draw.random() < 0.6:
        return {}
    limits: dict[str, float] = {"total_tokens_max": draw.choice([1, 200, 600, 1500])}
    return limits if draw.random() < 0.5 else limits | {"topped_up_tokens_max": 2000}
