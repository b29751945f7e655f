"""Users at work until the power cut, and the record of everything acknowledged to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.launcher.suite import Suite
from pawl.notify.v1 import notify_pb2, notify_pb2_grpc
from tests.keys import keyed_channel
from tests.poll import until
from tests.system.suite.client import Agent

_USERS = 6
_ANSWER = "Tonight at 19:00"


@dataclass
class Promise:
    user: str
    request_id: str
    text: str
    run_id: str
    events: list[event_pb2.RunEvent] = field(default_factory=list)
    answered_call_id: str = ""
    effect: Path | None = None

    @property
    def completed(self) -> bool:
        return bool(self.events) and self.events[-1].type == "run.completed"


class Users:
    def __init__(self, suite: Suite, effects: Path) -> None:
        self._suite = suite
        self._effects = effects
        self.promises: list[Promise] = []

    async def work_until(self, enough: Callable[[list[Promise]], bool], power_off: Callable[[], None]) -> None:
        """Work until `enough` returns True, then cut the power during the work."""
        off = asyncio.Event()
        tasks = [asyncio.create_task(self._work(f"user-{number}", off)) for number in range(_USERS)]
        try:

            async def is_enough() -> bool:
                for task in tasks:
                    if task.done():
                        task.result()
                return enough(self.promises)

            await until(is_enough)
            power_off()
            off.set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, user: str, off: asyncio.Event) -> None:
        async with Agent(self._suite.endpoints.services["agent-loop"][0].grpc, user=user) as agent:
            for number in itertools.count():
                try:
                    await self._one_run(agent, user, number)
                except grpc.aio.AioRpcError:
                    if off.is_set():
                        return
                    raise

    async def _one_run(self, agent: Agent, user: str, number: int) -> None:
        request_id = f"{user}-{number}"
        effect = self._effects / request_id
        texts = (
            "book a table",
            f"call act_once with {json.dumps({'path': str(effect), 'seconds': 0.05})}",
            "count to 40 slowly, then what is 6 * 7?",
            "what is 17 * 23?",
        )
        kind = number % len(texts)
        run = await agent.start(texts[kind], request_id=request_id)
        promise = Promise(user=user, request_id=request_id, text=texts[kind], run_id=run.run_id)
        promise.effect = effect if kind == 1 else None
        self.promises.append(promise)
        async for event in agent.watch(run.run_id):
            promise.events.append(event)
            call = event.call_changed.call
            if call.state == call_pb2.CALL_STATE_ASKED and not promise.answered_call_id:
                await agent.decide(
                    call, call_pb2.DECISION_KIND_ANSWER, request_id=f"answer-{request_id}", answer=_ANSWER
                )
                promise.answered_call_id = call.call_id


async def losses(suite: Suite, promises: list[Promise]) -> list[str]:
    users = sorted({promise.user for promise in promises})
    found = await asyncio.gather(*(_losses_of_user(suite, user, promises) for user in users))
    return [loss for losses_of_one in found for loss in losses_of_one]


async def _losses_of_user(suite: Suite, user: str, promises: list[Promise]) -> list[str]:
    mine = [promise for promise in promises if promise.user == user]
    found = []
    async with Agent(suite.endpoints.services["agent-loop"][0].grpc, user=user) as agent:
        for promise in mine:
            found += await _losses_of(agent, promise)
    return found + await _unreported(suite, mine)


async def _losses_of(agent: Agent, promise: Promise) -> list[str]:
    name = f"{promise.request_id} ({promise.text})"
    try:
        ended = await agent.until_ended(promise.run_id)
    except grpc.aio.AioRpcError as error:
        return [f"{name}: the run is gone: {error.code().name}"]
    found = []
    if ended.state != run_pb2.RUN_STATE_COMPLETED:
        found.append(f"{name}: it ended as {run_pb2.RunState.Name(ended.state)}")
    if (await agent.start(promise.text, request_id=promise.request_id)).run_id != promise.run_id:
        found.append(f"{name}: the same request made another run")
    log = await agent.events(promise.run_id)
    if log[: len(promise.events)] != promise.events:
        found.append(f"{name}: what was shown is not in the log")
    if promise.answered_call_id:
        (call,) = [call for call in await agent.calls(promise.run_id) if call.call_id == promise.answered_call_id]
        if _ANSWER.encode() not in call.result.content_json:
            found.append(f"{name}: the accepted answer had no effect")
    if promise.effect is not None:
        times = promise.effect.read_text().count("\n") if promise.effect.exists() else 0
        (call,) = await agent.calls(promise.run_id)
        allowed = {1} if call.state == call_pb2.CALL_STATE_SUCCEEDED else {0, 1}
        if times not in allowed:
            found.append(f"{name}: {times} effects of a call in {call_pb2.CallState.Name(call.state)}")
    return found


async def _unreported(suite: Suite, mine: list[Promise]) -> list[str]:
    reported: Counter[str] = Counter()
    wanted = {promise.run_id for promise in mine}

    async def is_reported() -> bool:
        reported.clear()
        reported.update(await _completions(suite, mine[0].user))
        return wanted <= set(reported)

    with contextlib.suppress(TimeoutError):
        await until(is_reported, patience_seconds=60)
    return [f"{run_id}: {reported[run_id]} notifications" for run_id in sorted(wanted) if reported[run_id] != 1]


async def _completions(suite: Suite, user: str) -> list[str]:
    async with keyed_channel(suite.endpoints.services["notifier"][0].grpc) as channel:
        answer = await notify_pb2_grpc.NotifyServiceStub(channel).ListNotifications(
            notify_pb2.ListNotificationsRequest(page_size=200), metadata=(("pawl-user", user), ("pawl-store", "local"))
        )
    wanted = notify_pb2.NOTIFICATION_KIND_RUN_COMPLETED
    return [found.run_id for found in answer.notifications if found.kind == wanted]
