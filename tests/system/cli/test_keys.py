"""`pawl keys`: keys are made, used everywhere at once, and refused everywhere soon after they are revoked (OPS-1)."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from pawl.agent.v1 import agent_pb2
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.chassis.credentials import UNKNOWN
from pawl.chassis.key_rows import is_secret, secret_of
from pawl.chassis.rpc_client import open_channel
from pawl.identity.v1 import key_pb2
from pawl.identity.v1.key_pb2_grpc import KeyServiceStub
from pawl.notify.v1 import notify_pb2
from pawl.notify.v1.notify_pb2_grpc import NotifyServiceStub
from pawl.tool.v1 import tool_pb2
from pawl.tool.v1.tool_pb2_grpc import ToolServiceStub
from tests import commands
from tests.poll import until
from tests.system.cli.conftest import CommandLine

# A call to each service, which an operator may make.
CALLS: Mapping[str, Callable[[grpc.aio.Channel], Any]] = {
    "agent-loop": lambda channel: AgentServiceStub(channel).ListRuns(agent_pb2.ListRunsRequest()),
    "tool-registry": lambda channel: ToolServiceStub(channel).ListTools(tool_pb2.ListToolsRequest()),
    "job-store": lambda channel: KeyServiceStub(channel).ListKeys(key_pb2.ListKeysRequest()),
    "notifier": lambda channel: NotifyServiceStub(channel).ListNotifications(notify_pb2.ListNotificationsRequest()),
}


def addresses(pawl: CommandLine) -> dict[str, str]:
    endpoints = json.loads((pawl.data / "endpoints.json").read_text())
    return {service: endpoints["services"][service][0]["grpc"] for service in CALLS}


async def answers(pawl: CommandLine, secret: str) -> dict[str, str]:
    """What each service says to a key."""

    async def ask(service: str, address: str) -> str:
        async with open_channel(address, service_key=secret) as channel:
            try:
                await CALLS[service](channel)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            return "OK"

    found = addresses(pawl)
    said = await asyncio.gather(*(ask(service, address) for service, address in found.items()))
    return dict(zip(found, said, strict=True))


async def is_refused(pawl: CommandLine, secret: str) -> bool:
    """Return whether every service refuses a key."""
    return set((await answers(pawl, secret)).values()) == {f"UNAUTHENTICATED: {UNKNOWN}"}


async def made(pawl: CommandLine, *arguments: str) -> tuple[str, str]:
    """Make a key; return its id and its secret."""
    code, output, errors = await asyncio.to_thread(pawl.run, "keys", "create", *arguments)
    assert code == 0, errors
    return errors.split()[1].rstrip("."), output.strip()


async def test_a_key_works_everywhere_at_once_and_nowhere_soon_after_it_is_revoked(pawl: CommandLine) -> None:
    key_id, secret = await made(pawl, "olga", "--role", "operator", "--name", "laptop", "--for", "1h")
    assert is_secret(secret)
    assert await answers(pawl, secret) == dict.fromkeys(CALLS, "OK")
    listed = await asyncio.to_thread(pawl.succeed, "keys", "list")
    (line,) = (line for line in listed.splitlines() if key_id in line)
    assert "olga\toperator\t" in line
    assert line.endswith("\tme\tlaptop")
    assert secret not in listed
    _, viewer = await made(pawl, "ann", "--role", "viewer")
    own = pawl.environment() | {"PAWL_API_KEY": viewer}
    done = await asyncio.to_thread(commands.pawl, "run", "--detach", "hello", environment=own)
    assert (done.code, "needs one of the roles" in done.errors) == (2, True)
    await asyncio.to_thread(pawl.succeed, "keys", "revoke", key_id)
    await until(lambda: is_refused(pawl, secret))
    assert key_id not in await asyncio.to_thread(pawl.succeed, "keys", "list")
    assert key_id in await asyncio.to_thread(pawl.succeed, "keys", "list", "--all")


async def test_the_first_key_of_the_deployment_is_made_once_and_makes_others(pawl: CommandLine) -> None:
    code, output, errors = await asyncio.to_thread(pawl.run, "keys", "bootstrap")
    assert code == 0, errors
    deployment = pawl.environment() | {"PAWL_API_KEY": output.strip()}
    code, again, errors = await asyncio.to_thread(pawl.run, "keys", "bootstrap")
    assert (code, again) == (2, "")
    assert "The deployment has a key" in errors

    async def run(*arguments: str) -> Any:
        return await asyncio.to_thread(commands.pawl, "keys", *arguments, environment=deployment)

    created = await run("create", "backend", "--in-store", "acme", "--role", "delegate", "--role", "member")
    assert created.code == 0, created.errors
    assert "backend\tdelegate, member" in (await run("list", "--in-store", "acme")).output
    assert "bootstrap" in (await run("list")).output
    secret = created.output.strip()
    expected = dict.fromkeys(CALLS, "OK") | {"job-store": "PERMISSION_DENIED: this needs the role operator"}
    assert await answers(pawl, secret) == expected
    bootstrap_id = (await run("list")).output.split("\t")[0]
    assert (await run("revoke", bootstrap_id)).code == 0


async def test_who_made_and_revoked_a_key_and_failed_logins_are_listed(pawl: CommandLine) -> None:
    """OPS-1: why, where and from where, without a secret; the caller is not told why."""
    key_id, secret = await made(pawl, "bob", "--role", "operator", "--name", "laptop")
    await asyncio.to_thread(pawl.succeed, "keys", "revoke", key_id)
    _, output, _ = await asyncio.to_thread(pawl.run, "keys", "bootstrap")
    deployment = pawl.environment() | {"PAWL_API_KEY": output.strip()}
    unknown = secret_of(secrets.token_bytes(32))

    async def listed(*arguments: str) -> str:
        done = await asyncio.to_thread(commands.pawl, "keys", "events", *arguments, environment=deployment)
        assert done.code == 0, done.errors
        assert secret not in done.output
        assert unknown not in done.output
        return done.output

    async def is_told() -> bool:
        lines = await listed("--kind", "logins-failed", "--json", "--count", "1000")
        found = [json.loads(line) for line in lines.splitlines()]
        told = {(each["service"], each["failures"]["kind"], each["key_id"]) for each in found}
        assert {each["failures"]["source"] for each in found} <= {"127.0.0.1", ""}
        return told >= {("agent-loop", "revoked", key_id), *((service, "unknown", "") for service in CALLS)}

    await until(lambda: is_refused(pawl, secret))
    assert await is_refused(pawl, unknown)
    await until(is_told)
    told = await listed("--key", key_id)
    created, revoked, failed, *_ = (line.split("\t") for line in told.splitlines())
    assert created[2:] == ["key created", "local", key_id, "bob", "operator", "me (local)", "laptop"]
    assert revoked[2:] == ["key revoked", "local", key_id, "bob", "operator", "me (local)", "laptop"]
    assert failed[2:5] == ["logins failed", "local", key_id]
    own = await asyncio.to_thread(pawl.succeed, "keys", "events", "--key", key_id, "--count", "1000")
    assert " revoked at agent-loop from 127.0.0.1" in own
    bootstrapped = (await listed("--kind", "key-bootstrapped")).splitlines()[-1].split("\t")[4]
    await asyncio.to_thread(commands.pawl, "keys", "revoke", bootstrapped, environment=deployment)


def test_what_cannot_be_a_key_is_refused_in_a_sentence(pawl: CommandLine) -> None:
    for arguments, says in (
        ("create ann --role delegate", "role that it has not itself"),
        ("create ann --role member --in-store acme", "another store"),
        ("create ann --role member --for soon", "no duration like"),
        ("revoke key_x", "`pawl keys list`"),
        ("bootstrap --database-url postgresql://127.0.0.1:1/nothing", "no database answers"),
    ):
        assert says in pawl.refuse("keys", *arguments.split()), arguments
