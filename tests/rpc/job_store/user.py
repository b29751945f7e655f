"""A user and a worker as clients of the job store."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pawl.agent.v1 import (
    agent_pb2,
    agents_pb2,
    conversation_pb2,
    declaration_pb2,
    operator_pb2,
    schedule_pb2,
    trigger_pb2,
    usage_pb2,
    workflow_pb2,
)
from pawl.chassis.identity.auth import Principal, for_user, user_principal
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.rpc.client import translated, translating
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from tests.rpc.stubs import LedgerServiceAsyncStub

M = TypeVar("M", bound=Message)
DIGEST = "ab" * 32
_numbers = itertools.count(1)
_FORWARDED = {
    method.name: method
    for file in (agents_pb2, conversation_pb2, declaration_pb2, schedule_pb2, trigger_pb2, usage_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name not in {"ImportConversation", "WatchConversation", "GetAgent", "ListAgents"}
}
for service, methods in (
    (agent_pb2.DESCRIPTOR.services_by_name["AgentService"], ("ListRuns", "ListCalls", "ListMessages")),
    (operator_pb2.DESCRIPTOR.services_by_name["OperatorService"], ("ListAttention",)),
    (workflow_pb2.DESCRIPTOR.services_by_name["WorkflowService"], ("ListWorkflows", "ListWorkflowVersions")),
):
    _FORWARDED |= {method: service.methods_by_name[method] for method in methods}


def result(text: str = '"ok"', *, is_error: bool = False) -> call_pb2.CallResult:
    return call_pb2.CallResult(content_json=text.encode(), is_error=is_error)


def forwarded(channel: grpc.aio.Channel, user: Principal, method: str, **fields: Any) -> Any:
    service = _FORWARDED[method]
    asked, answer = (GetMessageClass(kind) for kind in (service.input_type, service.output_type))
    call: Any = channel.unary_unary(
        f"/{service.containing_service.full_name}/{method}",
        request_serializer=asked.SerializeToString,
        response_deserializer=answer.FromString,
    )
    return call(asked(**fields), metadata=for_user(user))


async def _merged(parts: AsyncIterable[M], whole: M) -> M:
    with translating():
        async for part in parts:
            whole.MergeFrom(part)
    return whole


class Translated:
    def __init__(self, stub: object) -> None:
        self._stub = stub

    def __getattr__(self, method: str) -> Any:
        async def call(request: object) -> Any:
            with translating():
                return await getattr(self._stub, method)(request)

        return call


@dataclass
class User:
    stub: LedgerServiceAsyncStub
    store_id: str = "acme"
    user_id: str = "ann"
    roles: frozenset[str] = field(default_factory=frozenset)

    def with_roles(self, *roles: str) -> User:
        user = User(self.stub, store_id=self.store_id, user_id=self.user_id)
        user.roles = frozenset(roles)
        return user

    async def ask(self, method: str, **fields: Any) -> Any:
        own = _FORWARDED[method].input_type.fields_by_name if method in _FORWARDED else {}
        mine = {"store_id": self.store_id, "user_id": self.user_id} | {
            name: fields.pop(name) for name in ("store_id", "user_id") if name in fields and name not in own
        }
        if method in _FORWARDED:
            channel: grpc.aio.Channel = self.stub.channel  # type: ignore[attr-defined]  # see conftest
            user = user_principal(StoreId(mine["store_id"]), UserId(mine["user_id"]), self.roles)
            return await translated(forwarded(channel, user, method, **fields))
        request = getattr(pb, f"{method}Request")
        values = {name: value for name, value in mine.items() if name in request.DESCRIPTOR.fields_by_name} | fields
        return await getattr(Translated(self.stub), method)(request(**values))

    async def pages(self, method: str, field: str, **fields: Any) -> list[list[Any]]:
        found, token = list[list[Any]](), ""
        while not found or token:
            page = await self.ask(method, **fields, page_token=token)
            found.append(list(getattr(page, field)))
            token = page.next_page_token
        return found

    async def submit(self, text: str = "hello", **fields: Any) -> Any:
        values: dict[str, Any] = {"policy": pb.MESSAGE_POLICY_QUEUE, "user_id": self.user_id} | fields
        return await self.ask("SubmitMessage", text=text, **values)

    async def claim(self, worker_id: str = "w1", *, runs_max: int = 1, lease_seconds: float = 300) -> list[Any]:
        return list(
            (
                await self.ask(
                    "ClaimRuns",
                    worker_id=worker_id,
                    runs_max=runs_max,
                    lease_seconds=lease_seconds,
                    background_runs_max=64,
                )
            ).runs
        )

    async def start(self, text: str = "hello", **fields: Any) -> Owner:
        run = (await self.submit(text, **fields)).run
        owner = await self.take(run.run_id)
        owner.conversation_id = run.conversation_id
        await owner.commit(state=run_pb2.RUN_STATE_RUNNING)
        return owner

    async def talk(self, text: str, *answers: str, **fields: Any) -> Owner:
        """Start a run, commit the answers of its model, and complete it."""
        owner = await self.start(text, **fields)
        messages = [message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=answer) for answer in answers]
        await owner.commit(messages=messages)
        await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
        return owner

    async def take(self, run_id: str = "", worker_id: str = "w1") -> Owner:
        """Claim the only due run. Check its id if one is given."""
        (claimed,) = await self.claim(worker_id)
        assert run_id in {"", claimed.run_id}
        return Owner(self, claimed.run_id, claimed.epoch)

    def owner(self, run_id: str, epoch: int) -> Owner:
        return Owner(self, run_id, epoch)

    async def send(self, run_id: str, command_id: str = "", **kind: Any) -> Any:
        return await self.ask(
            "SendCommand", run_id=run_id, command=pb.Command(command_id=command_id or f"cmd_{next(_numbers)}", **kind)
        )

    async def cancel(self, run_id: str, command_id: str = "") -> Any:
        return await self.send(run_id, command_id, cancel=pb.CancelCommand(cause=run_pb2.STOP_CAUSE_USER))

    async def decide(self, run_id: str, call_id: str, kind: Any, command_id: str = "", **fields: Any) -> Any:
        return await self.send(
            run_id, command_id, decision=pb.DecisionCommand(call_id=call_id, kind=kind, **({"digest": DIGEST} | fields))
        )

    async def run(self, run_id: str) -> run_pb2.Run:
        run: run_pb2.Run = (await self.ask("GetRun", run_id=run_id)).run
        return run

    async def events(self, run_id: str, after_seq: int = 0) -> list[event_pb2.RunEvent]:
        page = await self.ask("ListEvents", run_id=run_id, after_seq=after_seq, events_max=1000)
        return [event_pb2.RunEvent.FromString(event) for event in page.events]

    async def lease(
        self, run_id: str, call_id: str, client_id: str, seconds: float = 60, session_id: str = "ses_1"
    ) -> Any:
        return await self.ask(
            "LeaseOffer",
            run_id=run_id,
            call_id=call_id,
            client_id=client_id,
            session_id=session_id,
            lease_seconds=seconds,
        )


@dataclass
class Owner:
    user: User
    run_id: str
    epoch: int
    conversation_id: str = ""

    async def commit(self, commit_id: str = "", *, consumed: Sequence[str] = (), **fields: Any) -> Any:
        return await self.user.ask(
            "CommitRun",
            run_id=self.run_id,
            epoch=self.epoch,
            commit_id=commit_id or f"commit_{next(_numbers):06}",
            consumed_command_ids=consumed,
            **fields,
        )

    async def load(self) -> pb.LoadRunResponse:
        request = pb.LoadRunRequest(store_id=self.user.store_id, run_id=self.run_id, epoch=self.epoch)
        return await _merged(self.user.stub.LoadRun(request), pb.LoadRunResponse())

    async def _commands(self) -> pb.ListCommandsResponse:
        request = pb.ListCommandsRequest(store_id=self.user.store_id, run_id=self.run_id)
        return await _merged(self.user.stub.ListCommands(request), pb.ListCommandsResponse())

    async def inbox(self) -> list[pb.Command]:
        return list((await self._commands()).commands)

    async def notices(self) -> list[pb.Notice]:
        return list((await self._commands()).notices)

    def call(self, call_id: str, state: Any, **fields: Any) -> call_pb2.Call:
        values: dict[str, Any] = {"round": 1, "tool_name": "tool", "tool_version": 1, "arguments_json": b"{}"}
        return call_pb2.Call(call_id=call_id, state=state, **(values | fields))

    async def park(self, *waits: Any, **fields: Any) -> Any:
        return await self.commit(
            state=run_pb2.RUN_STATE_WAITING, waits=waits, lease_action=pb.LEASE_ACTION_PARK, **fields
        )
