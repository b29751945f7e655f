from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from pawl.chassis.ids import CommandId, ConversationId, IdSource, StoreId
from pawl.chassis.process import logs, tasks
from pawl.errors import ConversationErased, DependencyUnavailable, PawlError
from pawl.event.v1.conversation_pb2 import Erasure as Receipt
from pawl.job_store.erasure.rules import FIRST, OWN, Erasure, ErasureKey, ItemPart, Part
from pawl.job_store.erasure.store.erasures import PostgresErasures
from pawl.job_store.ledger.group_commit import GroupCommit
from pawl.job_store.ledger.reading import ConversationReads
from pawl.job_store.ledger.rpc.operations import CANCEL
from pawl.job_store.ledger.rules.command import Cancel, Send
from pawl.job_store.lifecycle import stream as lifecycle_stream
from pawl.server.bus.connection import Bus
from pawl.values import StopCause

STREAM: Final = "PAWL_ERASED"
SUBJECTS: Final = "pawl.v1.*.erased.*"

_BYTES_MAX: Final = 256 * 1024 * 1024
_BATCH: Final = 256
_SECONDS: Final = 5.0
# The server removes a consumer after this long without a request.
_IDLE_SECONDS: Final = 30.0
_CONFIG: Final = StreamConfig(
    name=STREAM,
    subjects=[SUBJECTS],
    retention=RetentionPolicy.LIMITS,
    storage=StorageType.FILE,
    max_bytes=_BYTES_MAX,
    max_msgs_per_subject=1,
)


class JetStreamErasures:
    """Removes life-cycle events of erased runs from JetStream, and keeps a list of erased conversations there.

    All methods raise DependencyUnavailable while NATS is unavailable.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._opened_number = self._applied_number = 0

    async def open(self) -> bool | None:
        """Create the list if needed. Return whether it is empty.

        Return None if the list has already been applied on this connection. A new connection may reach a different
        server, so the list is applied again after each reconnection.
        """
        connection_number = self._bus.connection_number
        if self._applied_number == connection_number and self._bus.connected:
            return None
        with _translating():
            info = await lifecycle_stream.put_stream(self._bus, _CONFIG)
        self._opened_number = connection_number
        return info.state.messages == 0

    def applied(self) -> None:
        self._applied_number = self._opened_number

    async def read(self) -> AsyncIterator[Collection[tuple[StoreId, ConversationId]]]:
        with _translating():
            async for messages in _scan(self._bus.jetstream(), STREAM, SUBJECTS):
                places = [message.subject.split(".") for message in messages]
                yield [(StoreId(place[2]), ConversationId(place[4])) for place in places]

    async def write(self, key: ErasureKey) -> None:
        """Add a conversation to the list. Durable on return and idempotent."""
        with _translating():
            subject = f"pawl.v1.{key.store_id}.erased.{key.conversation_id}"
            await self._bus.jetstream().publish(subject, b"", timeout=_SECONDS, stream=STREAM)

    async def purge(self, store_id: StoreId, run_ids: Collection[str]) -> int:
        count = 0
        with _translating():
            jetstream = self._bus.jetstream()
            async for messages in _scan(jetstream, lifecycle_stream.STREAM, f"pawl.v1.{store_id}.lifecycle.*"):
                for message in messages:
                    if (message.headers or {}).get("ce-subject") in run_ids:
                        # The server overwrites the message securely.
                        await jetstream.delete_msg(lifecycle_stream.STREAM, message.metadata.sequence.stream)
                        count += 1
        return count


async def _scan(jetstream: JetStreamContext, stream: str, subject: str) -> AsyncIterator[Sequence[Msg]]:
    """Yield the messages that a stream currently stores for a subject, without payloads.

    If the stream does not exist, yield nothing.
    """
    config = ConsumerConfig(
        deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.NONE,
        headers_only=True,
        inactive_threshold=_IDLE_SECONDS,
        mem_storage=True,
    )
    try:
        subscription = await jetstream.pull_subscribe(subject, stream=stream, config=config)
    except NotFoundError:
        return
    try:
        pending = (await subscription.consumer_info()).num_pending or 0
        while pending > 0:
            messages = await subscription.fetch(min(pending, _BATCH), timeout=_SECONDS)
            pending -= len(messages)
            yield messages
    finally:
        await subscription.unsubscribe()


@contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except (nats.errors.Error, OSError, TimeoutError) as error:
        raise DependencyUnavailable(f"NATS: {type(error).__name__}") from error


T = TypeVar("T")

_SWEEP_SECONDS: Final = 5.0
_ERASURES_MAX: Final = 1000
_RUNS_MAX: Final = 200
_ROWS_MAX: Final = 500
_ITEMS_MAX: Final = 1000
# A purge covers all erasures since the last one, and reads all of a store's life-cycle events. The pause after a purge
# is this multiple of its duration.
_PURGE_PAUSE: Final = 9.0
# A crash may lose log entries that are newer than this.
_UNSURE_SECONDS: Final = 3600.0

_log = logs.get_logger(__name__)


class Erasing:
    """Erases conversations.

    If `log` is None, nothing is removed from JetStream, and there is no list of erased conversations.
    """

    def __init__(
        self,
        erasures: PostgresErasures,
        log: JetStreamErasures | None,
        group_commit: GroupCommit,
        conversations: ConversationReads,
        ids: IdSource,
        *,
        monotonic: Callable[[], float],
    ) -> None:
        self.erasures = erasures
        self._log = log
        self._group_commit = group_commit
        self._conversations = conversations
        self._ids = ids
        self._monotonic = monotonic
        self._purge_at = 0.0
        self._started = asyncio.Event()

    async def erase(self, key: ErasureKey) -> Receipt:
        """Start erasing a conversation, unless its erasure has already started. Return the progress.

        Raises:
            ConversationNotFound: The user has no such conversation, or its receipt has expired.
        """
        with suppress(ConversationErased):
            await self._conversations.by_id(key.store_id, key.user_id, key.conversation_id)
            await self.erasures.start(key)
            self._started.set()
        return await self.erasures.receipt(key)

    async def due(self, part: Part) -> AsyncIterator[tuple[ErasureKey, ItemPart]]:
        """Yield the ids of the runs and calls whose data a service must erase now.

        `has_more` is False in the last batch of each conversation.
        """
        async for erasure in self._open([part], without=FIRST):
            async for items in self._items(erasure.key):
                yield erasure.key, items

    async def run(self) -> None:
        """Run the sweep every five seconds, and also whenever an erasure starts."""
        while True:
            tasks.check_cancelled()
            self._started.clear()
            await self.sweep()
            await tasks.within(_SWEEP_SECONDS, self._started.wait())

    async def sweep(self) -> None:
        """Advance all open erasures as far as possible. A failing step does not block the other erasures."""
        if self._log is not None:
            await self._attempt(self._apply_log(self._log), "log")
        await self._attempt(self._sweep_open(), "open")

    async def _sweep_open(self) -> None:
        purged: dict[StoreId, list[Erasure]] = defaultdict(list)
        async for erasure in self._open(OWN, without=()):
            for part in erasure.next_parts:
                if part is Part.STREAM:
                    purged[erasure.key.store_id].append(erasure)
                else:
                    await self._attempt(self._do(erasure.key, part), part.value)
        start = self._monotonic()
        if start < self._purge_at:
            return
        for store_id, each in purged.items():
            await self._attempt(self._purge(store_id, each), Part.STREAM.value)
        now = self._monotonic()
        self._purge_at = now + (now - start) * _PURGE_PAUSE

    async def _open(self, parts: Collection[Part], *, without: Collection[Part]) -> AsyncIterator[Erasure]:
        """Yield all open erasures page by page. A stuck erasure does not block the others."""
        last: Erasure | None = None
        while page := await self.erasures.open(parts, without=without, after=last, rows_max=_ERASURES_MAX):
            for erasure in page:
                yield erasure
            last = page[-1]

    async def _attempt(self, step: Awaitable[T], name: str) -> T | None:
        try:
            return await step
        except PawlError as error:
            _log.info("erasing.postponed", step=name, reason=error.reason)
        except Exception:  # noqa: BLE001  # the next sweep tries again
            _log.exception("erasing.failed", step=name)
        return None

    async def _do(self, key: ErasureKey, part: Part) -> None:
        match part:
            case Part.RUNS:
                await self._end_runs(key)
            case Part.LEDGER:
                while await self.erasures.remove(key, rows_max=_ROWS_MAX):
                    tasks.check_cancelled()
                self._started.set()
            case Part.LOG:
                if self._log is not None:
                    await self._log.write(key)
                await self.erasures.done(key, part)
            case Part.STREAM | Part.TOOL_REGISTRY | Part.NOTIFIER:
                return

    async def _end_runs(self, key: ErasureKey) -> None:
        if await self.erasures.end_runs(key):
            self._started.set()  # The next part is due, and conversations below this one may have to be erased.
            return
        for run, user_id in await self.erasures.open_runs(key, runs_max=_RUNS_MAX):
            cancel = Send(
                run=run,
                user_id=user_id,
                command_id=CommandId(self._ids.new("cmd")),
                fingerprint=b"",
                command=Cancel(cause=StopCause.USER),
                payload=CANCEL,
            )
            await self._group_commit.run(cancel, size_bytes=len(CANCEL), store_id=key.store_id)

    async def _purge(self, store_id: StoreId, erasures: Sequence[Erasure]) -> None:
        run_ids = set[str]()
        for erasure in erasures:
            async for items in self._items(erasure.key):
                run_ids.update(items.run_ids)
        if self._log is not None and run_ids:
            await self._log.purge(store_id, run_ids)
        for erasure in erasures:
            await self.erasures.done(erasure.key, Part.STREAM)

    async def _apply_log(self, log: JetStreamErasures) -> None:
        """Erase listed conversations that have reappeared, for example after a restore.

        Add missing entries to the list.
        """
        is_new = await log.open()
        if is_new is None:
            return
        async for conversations in log.read():
            if count := await self.erasures.restart(conversations):
                _log.warning("erasing.again", conversations=count)
        await self.erasures.log_again(younger_than_seconds=None if is_new else _UNSURE_SECONDS)
        log.applied()

    async def _items(self, key: ErasureKey) -> AsyncIterator[ItemPart]:
        after, has_more = ("", ""), True
        while has_more:
            items = await self.erasures.items(key, after=after, items_max=_ITEMS_MAX)
            after, has_more = items.last, items.has_more
            yield items
