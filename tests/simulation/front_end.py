"""Front-end clients and watchers.

Sessions break, reconnect and repeat frames, and readers join at any seq.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from pawl.agent.v1 import session_pb2 as pb
from pawl.agent.v1.session_pb2 import SessionRequest, SessionResponse
from pawl.agent.v1.types_pb2 import ToolResult
from pawl.chassis.ids import RunId, RunKey, StoreId
from pawl.errors import PawlError
from pawl.event.v1.event_pb2 import RunEvent
from pawl.event.v1.gap_pb2 import Gap
from pawl.values import CommandOutcome
from tests.simulation.cluster import AgentLoop
from tests.simulation.history import Seen, Sent
from tests.simulation.people import User
from tests.simulation.registry import FRONT_END, OWN


class FrontEnd:
    def __init__(self, user: User) -> None:
        self._user = user
        self._world = user.world
        self._draw = user.world.chance.stream("front end", user.name)
        self._client_id = f"cli_{user.name}"
        self._unreceipted: dict[str, SessionRequest] = {}
        self._sent: dict[str, Sent] = {}
        self._positions: dict[str, int] = {}
        self._count = 0

    async def live(self) -> None:
        while not self._user.done:
            await self._session(self._world.some_agent(self._draw))
            await asyncio.sleep(0.2 + self._draw.random())

    async def _session(self, agent: AgentLoop) -> None:
        to_server: asyncio.Queue[SessionRequest | None] = asyncio.Queue()
        to_client: asyncio.Queue[SessionResponse | None] = asyncio.Queue()

        async def incoming() -> AsyncIterator[SessionRequest]:
            while (frame := await to_server.get()) is not None:
                yield frame

        async def send(frame: SessionResponse) -> None:
            await asyncio.sleep(0.001)
            to_client.put_nowait(frame)

        async def serve() -> None:
            try:
                await agent.clients.sessions.serve(self._user.caller, incoming(), send)
            except* PawlError:
                pass
            except* Exception as error:  # noqa: BLE001  # a fault of the program
                self._world.history.unexpected("session", error)
            finally:
                to_client.put_nowait(None)

        def broken() -> None:
            to_client.put_nowait(None)

        if not agent.process.alive:
            return
        agent.process.on_kill[broken] = None
        serving = agent.process.spawn(serve(), "session")
        breaks = 30.0 * self._draw.random() if self._draw.random() < 0.7 else 200.0
        try:
            async with asyncio.timeout(breaks):
                await self._talk(to_server, to_client)
        except TimeoutError:
            self._world.history.tell(f"session of {self._client_id} breaks")
        finally:
            agent.process.on_kill.pop(broken, None)
            serving.cancel()

    async def _talk(
        self, to_server: asyncio.Queue[SessionRequest | None], to_client: asyncio.Queue[SessionResponse | None]
    ) -> None:
        tools = [pb.ClientTool(name=name) for name in (*FRONT_END, OWN)]
        to_server.put_nowait(self._frame(hello=pb.Hello(client_id=self._client_id, tools=tools, calls_max=2)))
        attached: set[str] = set()
        running: list[asyncio.Task[None]] = []
        for unreceipted in self._unreceipted.values():
            to_server.put_nowait(unreceipted)
        self._unreceipted = {key: f for key, f in self._unreceipted.items() if f.HasField("tool_result")}
        async with asyncio.TaskGroup() as tasks:
            while not self._user.done:
                for run_id in self._user.run_ids:
                    if run_id not in attached and run_id not in self._user.ended:
                        attached.add(run_id)
                        after = self._positions.get(run_id, 0)
                        to_server.put_nowait(self._frame(attach=pb.Attach(run_id=run_id, after_seq=after)))
                try:
                    async with asyncio.timeout(2.0):
                        frame = await to_client.get()
                except TimeoutError:
                    to_server.put_nowait(self._frame(heartbeat=pb.ClientHeartbeat()))
                    continue
                if frame is None:
                    break
                if frame.HasField("offer"):
                    running.append(tasks.create_task(self._run(frame.offer, to_server)))
                self._take(frame)
            for task in running:
                task.cancel()

    def _take(self, frame: SessionResponse) -> None:
        match frame.WhichOneof("frame"):
            case "event":
                run_id, position = frame.event.run_id, self._positions.get(frame.event.run_id, 0)
                self._positions[run_id] = see(self._user, f"session {self._client_id}", run_id, position, frame.event)
            case "gap":
                run_id = frame.gap.run_id
                position = self._positions.get(run_id, 0)
                self._positions[run_id] = skip(self._user, self._client_id, run_id, position, frame.gap)
            case "receipt":
                receipt = frame.receipt
                self._unreceipted.pop(receipt.frame_id, None)
                if receipt.frame_id in self._sent:
                    self._sent[receipt.frame_id].outcomes.append(CommandOutcome(receipt.status).name)
            case _:
                pass

    async def _run(self, offer: pb.Offer, to_server: asyncio.Queue[SessionRequest | None]) -> None:
        call = offer.call
        await asyncio.sleep(self._draw.choice([0.1, 1.0, 8.0]) * self._draw.random())
        self._count += 1
        content = msgspec.json.encode(f"shown {self._client_id} {self._count}" + "." * self._user.result_padding)
        frame = self._frame(
            tool_result=ToolResult(
                run_id=call.run_id,
                call_id=call.call_id,
                content_json=content,
                is_error=False,
                offer_epoch=call.offer.offer_epoch,
            )
        )
        sent = Sent(
            user_id=self._user.name,
            command_id=frame.frame_id,
            run_id=call.run_id,
            kind="RESULT",
            call_id=call.call_id,
            content=content,
        )
        self._world.history.commands.append(sent)
        self._sent[frame.frame_id] = sent
        self._unreceipted[frame.frame_id] = frame
        for _ in range(2 if self._draw.random() < 0.2 else 1):
            to_server.put_nowait(frame)

    def _frame(self, **content: Any) -> SessionRequest:
        self._count += 1
        return SessionRequest(frame_id=f"frame_{self._count}", **content)


class Reader:
    """Watches the runs of a user from different positions in their logs, and disconnects at random."""

    def __init__(self, user: User) -> None:
        self._user = user
        self._draw = user.world.chance.stream("reader", user.name)
        self._count = 0

    async def live(self) -> None:
        while not self._user.done:
            await asyncio.sleep(0.5 + 4.0 * self._draw.random())
            if self._user.run_ids:
                self._count += 1
                name = f"reader {self._user.name} {self._count}"
                await self._watch(name, self._draw.choice(list(self._user.run_ids)))

    async def _watch(self, name: str, run_id: str) -> None:
        agent = self._user.world.some_agent(self._draw)
        watching = agent.process.spawn(self._read(agent, name, run_id, self._draw.choice([1, 3, 10, 1000])))
        await asyncio.wait([watching], timeout=4.0 * self._draw.random())
        watching.cancel()

    async def _read(self, agent: AgentLoop, name: str, run_id: str, events_max: int) -> None:
        position = 0
        try:
            async with (
                agent.clients.watches.open(self._user.caller, RunId(run_id), 0) as watcher,
                aclosing(watcher.events()) as events,
            ):
                async for event in events:
                    if isinstance(event, Gap):
                        position = skip(self._user, name, run_id, position, event)
                        continue
                    position = see(self._user, name, run_id, position, event)
                    if position >= events_max:
                        return
        except PawlError:
            return
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  # a fault of the program
            self._user.world.history.unexpected("watch", error)


def skip(user: User, watcher: str, run_id: str, position: int, gap: Gap) -> int:
    """EVT-1, checked immediately: a gap starts after the watcher's position and covers only removed events."""
    trimmed = user.world.tables.trimmed.get(RunKey(StoreId(user.caller.store_id), RunId(run_id)), 0)
    if gap.from_seq != position + 1 or gap.to_seq > trimmed:
        text = f"{watcher} at seq {position} of {run_id} got a gap {gap.from_seq} to {gap.to_seq} of {trimmed}"
        user.world.history.violation("seqs_without_gaps", text)
    return gap.to_seq


def see(user: User, watcher: str, run_id: str, position: int, event: RunEvent) -> int:
    """I7, I8, checked immediately: the event follows on `position`, and was in the ledger before it was seen."""
    if event.seq != position + 1:
        text = f"{watcher} got seq {event.seq} of {run_id} after {position}"
        user.world.history.violation("seqs_without_gaps", text)
    payload = event.SerializeToString()
    log = user.world.tables.events.get(RunKey(StoreId(user.caller.store_id), RunId(run_id)), [])
    if event.seq > len(log):
        text = f"{watcher} saw seq {event.seq} of {run_id}, but the log ends at {len(log)}"
        user.world.history.violation("durable_before_visible", text)
    user.world.history.seen.append(Seen(watcher=watcher, run_id=run_id, seq=event.seq, payload=payload))
    return event.seq
