"""Requests that are built again, compared with those that a model server received. The job-store is real."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pawl.agent.v1.steps_pb2 import GetRoundRequest, GetRoundResponse
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.rounds import Rebuilding, Rounds
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.drive import Drive
from pawl.agent_loop.loop.ledger import LEDGER_MESSAGE_BYTES_MAX, WorkerLedgerClient
from pawl.agent_loop.loop.model_call import request_of
from pawl.agent_loop.loop.rules.call import CallResult
from pawl.agent_loop.loop.rules.history import ReasoningEcho
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.run import RunOptions, ToolChoice, ToolChoiceMode
from pawl.agent_loop.model.client import body_of
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import StoreId, UserId, WorkerId
from pawl.chassis.rpc.client import open_channel
from pawl.errors import RoundNotFound, RunNotFound
from pawl.event.v1 import run_pb2
from tests.fakes.loop_world import World
from tests.fakes.registry import tool
from tests.rpc.agent_loop.model.conftest import no_proxy
from tests.rpc.agent_loop.model.model_http import DONE, STOP, Exchange, ModelHttp, serving, streams
from tests.rpc.job_store.conftest import Replica, database, replica, start
from tests.rpc.job_store.user import User
from tests.rpc.refusals import raises

__all__ = ["database", "no_proxy", "replica", "start"]

STORE, USER = "store", "user"
_DO: Any = partial(request_of, default_model="model", echo=ReasoningEcho.AUTO)
OPTIONS = RunOptions(
    instructions="Be brief.",
    temperature=0.5,
    tool_choice=ToolChoice(mode=ToolChoiceMode.REQUIRED),
    limits=Limits(context_bytes_max=3500, total_tokens_max=90_000),
)


async def reply(exchange: Exchange) -> None:
    """Call tools in two rounds, then answer."""
    prompt, count = exchange.body["messages"], 0
    if prompt[-1]["role"] == "tool":
        count = 2 if prompt[1]["content"].startswith("Summary") else 1
    is_summary = prompt[0]["content"].startswith("Summarise")
    if is_summary or count == 2:
        delta: dict[str, Any] = {"content": "They greeted." if is_summary else "Done."}
    else:
        names = ("mcp__look", "write") if count == 0 else ("mcp__look",)
        calls = [
            {"index": n, "id": f"p{n}", "function": {"name": name, "arguments": json.dumps({"ä": count})}}
            for n, name in enumerate(names)
        ]
        delta = {"reasoning_content": "Hm.", "tool_calls": calls}
    await streams({"choices": [{"index": 0, "delta": delta}]}, STOP, DONE)(exchange)


class Player:
    def __init__(self, channel: Any, user: User, server: ModelHttp, world: World) -> None:
        self._channel = channel
        self.user = user
        self._server = server
        self._world = world

    async def play(self, text: str, conversation_id: str = "") -> tuple[Any, list[bytes]]:
        """Drive a run to its end. Return it and the requests of its rounds, without those for summaries."""
        before = len(self._server.exchanges)
        run = (await self.user.submit(text, conversation_id=conversation_id, options=wire.OPTIONS.write(OPTIONS))).run
        claims, _ = await self._world.dependencies.ledger.claim(WorkerId("w1"), runs_max=1, lease_seconds=60)
        await Drive(next(iter(claims)), self._world.dependencies).run()
        run = (await self.user.ask("GetRun", run_id=run.run_id)).run
        assert run.state == run_pb2.RUN_STATE_COMPLETED, run.failure
        sent = self._server.exchanges[before:]
        return run, [each.data for each in sent if not each.body["messages"][0]["content"].startswith("Summarise")]

    async def get(self, run_id: str, number: int, user_id: str = USER, body: Any = body_of) -> GetRoundResponse:
        registry: Any = self._world.registry
        rounds = Rounds(PublicLedger(self._channel), registry, Rebuilding(_DO, body))
        caller = Principal(store_id=StoreId(STORE), user_id=UserId(user_id))
        return await rounds.get(caller, GetRoundRequest(run_id=run_id, round=number))


@pytest.fixture
async def player(replica: Replica, tmp_path: Path) -> AsyncIterator[Player]:
    async with (
        open_channel(f"unix:{tmp_path}/1", message_bytes_max=LEDGER_MESSAGE_BYTES_MAX, batches=True) as channel,
        serving(reply) as (server, model),
    ):
        verdicts = {"write": tool(), "mcp.look": tool(effect="READ_ONLY")}
        world = World(verdicts, [], seconds=0.001)
        world.registry.reads_at_once = True
        world.registry.results["mcp.look"] = CallResult(content_json=json.dumps("x" * 1500).encode())
        world.dependencies = dataclasses.replace(world.dependencies, ledger=WorkerLedgerClient(channel), model=model)
        yield Player(channel, User(replica.stub, store_id=STORE, user_id=USER), server, world)


async def test_rebuilt_request_equals_the_bytes_that_the_model_server_received(player: Player) -> None:
    """Also for rounds before and after a summary, for a later run, and for a run in a fork."""
    first, sent = await player.play("Hello")
    again, more = await player.play("Again", first.conversation_id)
    fork = await player.user.ask("ForkConversation", conversation_id=first.conversation_id, number=5)
    forked, last = await player.play("Or so", fork.conversation.conversation_id)
    assert len(sent) >= 3
    assert any(b"Summary of the conversation" in data for data in sent)
    for run, requests in ((first, sent), (again, more), (forked, last)):
        for number, data in enumerate(requests, 1):
            found = await player.get(run.run_id, number)
            assert found.request_json == data, number
            assert (found.matches, found.sent_sha256) == (True, hashlib.sha256(data).hexdigest())
            assert (found.usage.model_calls, found.finish_reason) == (1, "stop")
            assert list(found.message.call_ids) == [call.call_id for call in found.calls]
            assert found.start_time.ToNanoseconds() <= found.end_time.ToNanoseconds()
    other = await player.get(first.run_id, 1, body=partial(body_of, output_tokens_field="max_tokens"))
    assert (other.matches, b'"max_tokens"' in other.request_json) == (False, True)
    await raises(RoundNotFound, player.get(first.run_id, len(sent) + 1))
    await raises(RunNotFound, player.get(first.run_id, 1, user_id="another"), player.get("run_missing", 1))
