"""Polls the mailboxes that this process leases, and delivers each message to its trigger."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import grpc
from prometheus_client import Counter

from pawl.agent.v1 import trigger_pb2_grpc
from pawl.agent.v1.trigger_pb2 import DeliverMailRequest
from pawl.chassis.ids import StoreId
from pawl.chassis.process import logs
from pawl.chassis.process.tasks import end
from pawl.chassis.rpc.client import translated
from pawl.errors import InvalidField, PawlError, TooLarge, TriggerPaused
from pawl.event.v1.trigger_pb2 import LeasedMailbox, MailboxSource, MailPosition
from pawl.job.v1 import triggers_pb2, triggers_pb2_grpc
from pawl.mailbox.poll import Unreadable
from pawl.server.egress.client import GuardedEgress
from pawl.server.egress.policy import EgressRefused
from pawl.server.rpc.fairness import FairSlots
from pawl.tool.v1 import document_pb2, document_pb2_grpc

# Time between two calls to LeaseMailboxes.
LEASE_SECONDS: Final = 5.0
# Maximum number of concurrent polls. Each store has a quota.
POLLS_MAX: Final = 16
POLL_SECONDS_MAX: Final = 60.0
_LINE_BYTES_MAX: Final = 16 * 1024 * 1024
_POLL_SECONDS: Final = 60
_BACKOFF_SECONDS_MAX: Final = 3600
# The longest pause after a failure of another service.
_INTERRUPTED_SECONDS_MAX: Final = 300
_DOUBLINGS_MAX: Final = 10
_SETTINGS: Final = ("PAWL_", "OPENAI_")
# Signals that stop a process from outside, so that the message is not the cause.
_STOPS: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})

# Store, id and generation of a trigger.
_Key: TypeAlias = tuple[str, str, int]

_log = logs.get_logger(__name__)


class Mailboxes:
    """Reads the mailboxes that this process leases. A slow server delays only mailboxes of the same store."""

    def __init__(
        self,
        job_store: grpc.aio.Channel,
        agent_loop: grpc.aio.Channel,
        tool_registry: grpc.aio.Channel,
        *,
        key: Callable[[], str],
        passwords: Callable[[], Mapping[str, Mapping[str, str]]],
        egress: GuardedEgress,
        reader_id: str,
        failures: Counter,
    ) -> None:
        self._ledger = triggers_pb2_grpc.TriggerLedgerServiceStub(job_store)
        self._triggers = trigger_pb2_grpc.TriggerServiceStub(agent_loop)
        self._documents = document_pb2_grpc.DocumentServiceStub(tool_registry)
        self._key = key
        self._passwords = passwords
        self._egress = egress
        self._reader_id = reader_id
        self._failures = failures
        self._slots = FairSlots(POLLS_MAX)
        self._readers: dict[_Key, asyncio.Task[None]] = {}
        # Number of interruptions of each mailbox's reader since its last progress.
        self._interrupted: dict[_Key, int] = {}

    async def run(self) -> None:
        """Lease mailboxes and poll them until this is cancelled.

        Raises:
            PawlError: The leases cannot be renewed, so polling has stopped.
        """
        try:
            while True:
                await self._lease()
                await asyncio.sleep(LEASE_SECONDS)
        finally:
            await end(self._readers.values())
            self._readers.clear()

    async def _lease(self) -> None:
        request = triggers_pb2.LeaseMailboxesRequest(reader_id=self._reader_id)
        response = await translated(self._ledger.LeaseMailboxes(request))
        leased = {_key(each): each for each in response.mailboxes}
        await end(self._readers.pop(key) for key in self._readers.keys() - leased.keys())
        self._interrupted = {key: count for key, count in self._interrupted.items() if key in leased}
        for key, mailbox in leased.items():
            if key not in self._readers or self._readers[key].done():
                self._readers[key] = asyncio.create_task(self._read(mailbox), name="mailbox")

    async def _read(self, mailbox: LeasedMailbox) -> None:
        """Poll one mailbox until its trigger changes or another service fails, then pause.

        The next renewal of the lease after the pause starts a new reader.
        """
        try:
            await self._read_forever(mailbox)
        except PawlError as error:
            _log.warning("mailbox.interrupted", store=mailbox.store_id, reason=error.reason)
        except Exception:  # noqa: BLE001  # one mailbox must not stop the others
            _log.exception("mailbox.interrupted", store=mailbox.store_id)
        self._failures.inc()
        key = _key(mailbox)
        self._interrupted[key] = self._interrupted.get(key, 0) + 1
        seconds = LEASE_SECONDS * 2 ** min(self._interrupted[key], _DOUBLINGS_MAX)
        await asyncio.sleep(min(seconds, _INTERRUPTED_SECONDS_MAX))

    async def _read_forever(self, mailbox: LeasedMailbox) -> None:
        failures, is_reported = 0, False
        while True:
            has_more = False
            try:
                has_more = await self._poll(mailbox)
            except Unreadable as error:
                _log.warning("mailbox.unreadable", store=mailbox.store_id, reason=str(error))
                await self._report(mailbox, reason=str(error))
                self._failures.inc()
                failures += 1
            else:
                if failures or not is_reported:
                    await self._report(mailbox)
                self._interrupted.pop(_key(mailbox), None)
                failures, is_reported = 0, True
            seconds = (mailbox.mailbox.poll_seconds or _POLL_SECONDS) * 2 ** min(failures, _DOUBLINGS_MAX)
            await asyncio.sleep(0 if has_more else min(seconds, _BACKOFF_SECONDS_MAX))

    async def _poll(self, mailbox: LeasedMailbox) -> bool:
        """Deliver the next messages. Return whether to poll again immediately, because more messages may follow.

        Raises:
            Unreadable: The mailbox cannot be read.
            PawlError: A message cannot be delivered right now.
        """
        lines = await self._lines(mailbox.store_id, await self._poll_request(mailbox))
        start, error, has_more = MailPosition(), "", False
        start.CopyFrom(mailbox.position)
        for line in lines:
            if "uid_validity" in line and line["uid_validity"] != mailbox.position.uid_validity:
                mailbox.position.CopyFrom(MailPosition(uid_validity=line["uid_validity"], uid=line["last_uid"]))
                await self._report(mailbox, mailbox.position)
            elif "data" in line:
                await self._deliver(mailbox, line["uid"], line["data"])
            error, has_more = line.get("error", ""), line.get("has_more", False)
        has_moved = start != mailbox.position
        if error and not has_moved:
            raise Unreadable(f"{mailbox.mailbox.host}:{mailbox.mailbox.port} {error}")
        return has_moved and (has_more or bool(error))

    async def _poll_request(self, mailbox: LeasedMailbox) -> dict[str, Any]:
        """Return the input for the poll process.

        Raises:
            Unreadable: The password is missing or unusable, or the deployment does not allow the host.
        """
        source, store_id = mailbox.mailbox, StoreId(mailbox.store_id)
        password = self._passwords().get(store_id, {}).get(source.password_secret, "")
        if not (password and password.isprintable()):
            name = source.password_secret
            raise Unreadable(f"PAWL_MAILBOX_PASSWORDS_FILE has no usable password named {name!r} for this store")
        host = f"[{source.host}]" if ":" in source.host else source.host
        scheme = "http" if source.plaintext else "https"
        try:
            target, addresses = await self._egress.locate(store_id, f"{scheme}://{host}:{source.port}/")
        except EgressRefused as refused:
            raise Unreadable(f"the deployment does not allow the host: {refused}") from None
        return {
            "host": target.host,
            "port": target.port,
            "addresses": list(map(str, addresses)),
            "plaintext": source.plaintext,
            "username": source.username,
            "password": password,
            "folder": source.folder,
            "uid_validity": mailbox.position.uid_validity,
            "uid": mailbox.position.uid,
            "counts": {
                "own": source.username,
                "authserv_id": source.authserv_id,
                "senders": list(source.senders),
            },
        }

    async def _lines(self, store_id: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
        await self._slots.enter(store_id)
        work = asyncio.create_task(run_poll(asked), name="poll")
        self._slots.leave_after(work, store_id)
        return await work

    async def _deliver(self, mailbox: LeasedMailbox, uid: int, data: dict[str, Any]) -> None:
        """Store a message's attachments, then deliver the message. Idempotent.

        Raises:
            TriggerPaused: The trigger has changed or is paused.
        """
        position = MailPosition(uid_validity=mailbox.position.uid_validity, uid=uid)
        event_id = f"{_folder_id(mailbox.mailbox)}.{position.uid_validity}.{uid}"
        for number, attachment in enumerate(data.get("attachments", ())):
            if "text" in attachment:
                name = f"mail/{mailbox.name}/{event_id}/{number}-{attachment['name']}"
                attachment.update(await self._keep(mailbox, name, attachment.pop("text")))
        request = DeliverMailRequest(
            trigger_id=mailbox.trigger_id,
            generation=mailbox.generation,
            event_id=event_id,
            position=position,
            data_json=json.dumps(data).encode(),
            skipped=data.get("refusal", ""),
        )
        answer = await self._triggers.DeliverMail(request, metadata=self._metadata(mailbox))
        if not (answer.duplicate or answer.HasField("fire")):
            raise TriggerPaused
        mailbox.position.CopyFrom(position)
        self._interrupted.pop(_key(mailbox), None)

    async def _keep(self, mailbox: LeasedMailbox, name: str, text: str) -> dict[str, str]:
        request = document_pb2.PutDocumentRequest(owner=document_pb2.DOCUMENT_OWNER_USER, name=name, text=text)
        try:
            await self._documents.PutDocument(request, metadata=self._metadata(mailbox))
        except (InvalidField, TooLarge) as refused:
            return {"left_out": refused.message}
        return {"document": name}

    async def _report(self, mailbox: LeasedMailbox, position: MailPosition | None = None, reason: str = "") -> None:
        request = triggers_pb2.ReportMailboxRequest(
            store_id=mailbox.store_id,
            trigger_id=mailbox.trigger_id,
            generation=mailbox.generation,
            position=position,
            reason=reason,
        )
        await translated(self._ledger.ReportMailbox(request))

    def _metadata(self, mailbox: LeasedMailbox) -> tuple[tuple[str, str], ...]:
        key = ("authorization", f"Bearer {self._key()}")
        return key, ("pawl-store", mailbox.store_id), ("pawl-user", mailbox.user_id)


async def run_poll(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Run `poll` in a subprocess and return its output lines.

    If the subprocess crashes or exceeds its CPU limit while parsing a message, the last line refuses that message.
    After any other failure, the last line has an `error`.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    program = (sys.executable, "-m", "pawl.mailbox.poll")
    process = await asyncio.create_subprocess_exec(
        *program, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment, limit=_LINE_BYTES_MAX
    )
    assert process.stdin is not None  # noqa: S101  # started with pipes
    assert process.stdout is not None  # noqa: S101
    lines: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(POLL_SECONDS_MAX):
            process.stdin.write(json.dumps(asked).encode())
            process.stdin.close()
            async for line in process.stdout:
                if line.endswith(b"\n"):  # A killed process may leave half a line.
                    lines.append(json.loads(line))  # noqa: PERF401  # lines before a timeout count
            status = await process.wait()
    except TimeoutError:
        return [*lines, {"error": "did not answer in time"}]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not status:
        return lines
    is_slow = status == -signal.SIGXCPU
    if lines and "uid" in lines[-1] and "data" not in lines[-1] and -status not in _STOPS:
        refusal = f"{'parsing it takes too long' if is_slow else 'it cannot be parsed'}"
        return [*lines, {**lines[-1], "data": {"refusal": refusal}}]
    ended = f"cannot be read: the poll process ended with status {status}"
    return [*lines, {"error": "takes too long to read" if is_slow else ended}]


def _key(mailbox: LeasedMailbox) -> _Key:
    return mailbox.store_id, mailbox.trigger_id, mailbox.generation


def _folder_id(source: MailboxSource) -> str:
    """Return a folder's id, which is needed because different folders can contain the same UIDs."""
    named = json.dumps([source.host, source.port, source.plaintext, source.username, source.folder])
    return hashlib.sha256(named.encode()).hexdigest()[:8]
