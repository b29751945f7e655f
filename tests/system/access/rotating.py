"""A suite in which all that says who calls is replaced, and the people who work with it meanwhile."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pawl.identity.v1 import key_pb2
from pawl.identity.v1.key_pb2_grpc import KeyServiceStub
from pawl.launcher.suite import Suite
from tests.fakes.issuer import IssuerServer, key, token
from tests.files import put
from tests.poll import until
from tests.system.access.person import Person, bearer

ASKED = {
    "agent-loop": "/pawl.agent.v1.AgentService/ListRuns",
    "tool-registry": "/pawl.tool.v1.ToolService/ListTools",
    "job-store": "/pawl.identity.v1.KeyService/ListKeys",
    "notifier": "/pawl.notify.v1.NotifyService/ListNotifications",
}
"""A method of each service for which every credential will do, or is said to be known."""
CALLED = ("job-store", "tool-registry")
PEERS = {"agent-loop": 2, "tool-registry": 1, "notifier": 1}
"""How many other services each of them calls."""
PROCESSES = (*ASKED, "postgres", "nats", "model")
DEPLOYMENT, FILE_KEY, NEXT_FILE_KEY = "key-of-the-deployment", "key-of-bob-0123456789", "next-key-of-bob-0123456789"
REFUSED_SECONDS_MAX = 60.0
"""What is withdrawn counts no more within five seconds; the rest is for a machine with much to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A running suite, what it is configured by, and the people who work with it."""

    suite: Suite
    folder: Path
    issuer: IssuerServer
    channels: dict[str, grpc.aio.Channel]
    people: dict[str, Person]
    key_ids: dict[str, str]
    """Of keys that are rows, by their secrets."""

    async def runs_go_on(self) -> None:
        """Return once each of the people has begun another run, and ended it."""
        begun = {person: person.begun for person in self.people.values()}

        async def have_ended() -> bool:
            return all(person.begun > number + 1 for person, number in begun.items())

        await until(have_ended)

    async def knows(self, service: str, credential: str) -> bool:
        """Ask one of the services whether a credential counts."""
        ask: Any = self.channels[service].unary_unary(ASKED[service])
        try:
            await ask(b"", metadata=bearer(credential))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return False
            if error.code() is not grpc.StatusCode.PERMISSION_DENIED:
                raise
        return True

    async def until_known_everywhere(self, credential: str) -> None:
        for service in ASKED:
            await until(lambda service=service: self.knows(service, credential))  # type: ignore[misc]

    async def until_refused_everywhere(self, credential: str) -> None:
        for service in ASKED:

            async def is_refused(service: str = service) -> bool:
                return not await self.knows(service, credential)

            await until(is_refused, patience_seconds=REFUSED_SECONDS_MAX)

    def told(self, service: str, event: str, **fields: str) -> int:
        """Count what a service has said in its log."""
        entries = self.suite.process(service).log.told(event)
        return sum(entry.get("event") == event and fields.items() <= entry.items() for entry in entries)

    def addresses(self, service: str) -> dict[str, str]:
        return dict(self.suite.process(service).addresses or {})

    def write_keys(self, *keys: str) -> None:
        """Write the file of keys: that of the deployment, and those of bob."""
        entries: list[dict[str, Any]] = [{"key": DEPLOYMENT, "user_id": "olga", "roles": ["deployment"]}]
        entries += [{"key": each, "store_id": "acme", "user_id": "bob", "roles": ["member"]} for each in keys]
        put(self.folder / "keys.json", json.dumps(entries))

    def secret(self, name: str) -> Path:
        return self.suite.folder.path / "secrets" / name

    async def make_key(self) -> str:
        """Make a key of ann, and return its secret."""
        stub: Any = KeyServiceStub(self.channels["job-store"])
        request = key_pb2.CreateKeyRequest(
            key=key_pb2.Key(name="rotating", store_id="acme", user_id="ann", roles=["member"])
        )
        made = await stub.CreateKey(request, metadata=bearer(DEPLOYMENT))
        self.key_ids[made.secret] = made.key.key_id
        return str(made.secret)

    async def revoke_key(self, secret: str) -> None:
        stub: Any = KeyServiceStub(self.channels["job-store"])
        await stub.RevokeKey(key_pb2.RevokeKeyRequest(key_id=self.key_ids[secret]), metadata=bearer(DEPLOYMENT))

    def token(self, name: str) -> str:
        """Return a token of cid, signed with a key of that name."""
        now = int(time.time())
        return token(iss=self.issuer.issuer, iat=now, exp=now + 3600, sub="cid", tenant=None, private=key(name=name))
