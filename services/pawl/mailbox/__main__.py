"""Runs the mailbox reader: `python -m pawl.mailbox`."""

from __future__ import annotations

import asyncio

import msgspec

from pawl.chassis.process.watched_file import WatchedFile
from pawl.mailbox.mailboxes import Mailboxes
from pawl.mailbox.settings import MailboxSettings
from pawl.server.egress.client import GuardedEgress, read_egress_file
from pawl.server.identity.credentials import service_key
from pawl.server.process.service import Service, run_service
from pawl.server.process.settings import load


def parse_passwords(content: bytes) -> dict[str, dict[str, str]]:
    """Return the passwords by store and name.

    Raises:
        ValueError: The content is malformed.
    """
    try:
        return msgspec.json.decode(content, type=dict[str, dict[str, str]])
    except msgspec.DecodeError:
        raise ValueError('it must be JSON like {"store": {"name": "password"}}') from None


async def main(stop: asyncio.Event) -> None:
    settings = load(MailboxSettings)
    async with Service("mailbox", settings) as service:
        mailboxes = Mailboxes(
            await service.open_channel("job_store", settings.job_store_address, optional=True),
            await service.open_channel("agent_loop", settings.agent_loop_address, public=True, optional=True),
            await service.open_channel("tool_registry", settings.tool_registry_address, public=True, optional=True),
            key=service_key(settings, service.clock) or str,
            passwords=WatchedFile(
                settings.mailbox_passwords_file, "PAWL_MAILBOX_PASSWORDS_FILE", parse_passwords, service.clock
            ),
            egress=GuardedEgress(read_egress_file(settings.egress_file)),
            reader_id=service.ids.new("mbx"),
            failures=service.metrics.counter("failures_total", "Mailbox polls that failed."),
        )
        service.background.start("mailboxes", mailboxes.run)
        await service.serve(service.rpc_server(), stop)


if __name__ == "__main__":
    run_service(main)
