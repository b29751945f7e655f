"""The roles of a user go with the run: from the credential, over the ledger, to the registry."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from pawl.agent_loop.adapters.public_ledger import PublicLedgerClient
from pawl.agent_loop.adapters.worker_ledger import LEDGER_MESSAGE_BYTES_MAX, WorkerLedgerClient
from pawl.agent_loop.app.public_values import MessagePolicy, NewMessage
from pawl.agent_loop.domain.options import AskedOptions
from pawl.agent_loop.domain.run import RunOptions
from pawl.chassis.auth import Principal
from pawl.chassis.ids import ConversationId, CredentialId, RequestId, StoreId, UserId, WorkerId
from pawl.chassis.rpc_client import open_channel
from tests.rpc.job_store.conftest import Replica, database, replica, start

__all__ = ["database", "replica", "start"]

MEMBER = Principal(store_id=StoreId("acme"), user_id=UserId("ann"), roles=frozenset({"member"}))
ADMIN = Principal(store_id=StoreId("acme"), user_id=UserId("ann"), roles=frozenset({"member", "admin"}))


@pytest.fixture
async def clients(replica: Replica, tmp_path: Path) -> AsyncIterator[tuple[PublicLedgerClient, WorkerLedgerClient]]:
    async with open_channel(f"unix:{tmp_path}/1", message_bytes_max=LEDGER_MESSAGE_BYTES_MAX, batches=True) as channel:
        yield PublicLedgerClient(channel), WorkerLedgerClient(channel)


def message(request_id: str = "", *, policy: MessagePolicy = MessagePolicy.QUEUE) -> NewMessage:
    return NewMessage(
        request_id=RequestId(request_id),
        conversation_id=ConversationId("conv"),
        conversation_must_exist=False,
        text="hello",
        options=RunOptions(),
        asked_options=AskedOptions(),
        policy=policy,
    )


async def roles_in_the_loop(worker: WorkerLedgerClient) -> tuple[str, ...]:
    (claim,) = await worker.claim(WorkerId("worker"), runs_max=1, lease_seconds=10)
    return (await worker.load(claim)).run.user_roles


async def test_a_run_has_the_credential_that_started_it_and_each_decision_its_own(
    clients: tuple[PublicLedgerClient, WorkerLedgerClient],
) -> None:
    """HITL-4: kept in the ledger, and told to the loop; who started it counts, and not who entered it."""
    public, worker = clients
    mine = replace(MEMBER, credential_id=CredentialId("key_1"), delegate_user_id=UserId("shop"))
    created, _ = await public.submit_message(mine, message("r1"))
    again, _ = await public.submit_message(replace(MEMBER, credential_id=CredentialId("key_2")), message("r1"))
    assert (again.run_id, again.credential_id, again.delegate_user_id) == (created.run_id, "key_1", "shop")
    other = replace(MEMBER, credential_id=CredentialId("key_2"))
    _, steered = await public.submit_message(other, message(policy=MessagePolicy.STEER))
    assert steered
    (claim,) = await worker.claim(WorkerId("worker"), runs_max=1, lease_seconds=10)
    loaded = await worker.load(claim)
    assert (loaded.run.credential_id, loaded.run.delegate_user_id) == ("key_1", "shop")
    (steer,) = loaded.commands
    assert (steer.user_id, steer.credential_id, steer.delegate_user_id) == ("ann", "key_2", "")


async def test_a_message_that_enters_a_run_does_not_widen_its_roles(
    clients: tuple[PublicLedgerClient, WorkerLedgerClient],
) -> None:
    public, worker = clients
    await public.submit_message(MEMBER, message())
    _, steered = await public.submit_message(ADMIN, message(policy=MessagePolicy.STEER))
    assert steered
    assert await roles_in_the_loop(worker) == ("member",)


async def test_a_request_is_the_same_with_other_roles(clients: tuple[PublicLedgerClient, WorkerLedgerClient]) -> None:
    """I2: a key that got another role between two attempts makes no second run, and the first keeps its roles."""
    public, worker = clients
    first, _ = await public.submit_message(MEMBER, message("r1"))
    again, _ = await public.submit_message(ADMIN, message("r1"))
    assert again.run_id == first.run_id
    assert await roles_in_the_loop(worker) == ("member",)
