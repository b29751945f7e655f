"""OPS-1: every method of every listener answers each caller as the table of methods and roles requires."""

from __future__ import annotations

import time
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.batch.v1 import batch_pb2, batch_pb2_grpc
from pawl.chassis.identity.auth import for_user, user_principal
from pawl.chassis.identity.roles import CALLERS, ROLES
from pawl.chassis.ids import StoreId, UserId
from pawl.identity.v1 import key_pb2
from pawl.identity.v1.key_pb2_grpc import KeyServiceStub
from pawl.server.identity.key_rows import secret_of
from tests.poll import until
from tests.system.access.conftest import LISTENERS, ROLES_OF_CALLERS, Walked, bearer, key
from tests.system.access.walk import OPEN, is_forwarded, methods, wrong

pytestmark = pytest.mark.asyncio(loop_scope="session")

TAKE_BATCHES = ("tool-registry", "job-store")
KNOW_SERVICES = (*TAKE_BATCHES, "agent-loop")
SERVICES = (*LISTENERS, "mailbox")
BAD = {
    "absent": (),
    "empty": (("authorization", ""),),
    "no key": (("authorization", "Bearer "),),
    "no scheme": (("authorization", "key-of-admin-0123456789"),),
    "another scheme": (("authorization", "Basic a2V5LW9mLWFkbWlu"),),
    "huge": (("authorization", f"Bearer {'x' * 9000}"),),
    "two": (("authorization", "Bearer key-of-admin-0123456789"), ("authorization", "Bearer key-of-admin-0123456789")),
    "two, one empty": (("authorization", "Bearer key-of-admin-0123456789"), ("authorization", "")),
}
UNKNOWN = {
    "short": "x",
    "besides a known one": "key-of-admin-012345678",
    "of another case": "KEY-OF-ADMIN-0123456789",
    "of the form of a token": "eyJhbGciOiJub25lIn0.eyJzdWIiOiJtZSJ9.",
    "long": "y" * 4000,
}


async def test_walk_covers_every_contract_method(walked: Walked) -> None:
    everything = {name for names in walked.methods.values() for name in names}
    assert everything == set(methods())
    assert everything - OPEN.keys() == set(CALLERS)


async def test_role_may_call_only_permitted_methods(walked: Walked) -> None:
    for caller, roles in ROLES_OF_CALLERS.items():
        callers = {role for role in roles if role in ROLES} or {"member"}
        if caller == "delegate-and-finance":
            callers = set()  # A forwarding service has no permissions of its own.
        assert wrong(await walked.answers(key(caller)), callers, "PERMISSION_DENIED") == {}, caller


async def test_a_service_may_call_only_permitted_methods_and_only_with_its_certificate(walked: Walked) -> None:
    for service in SERVICES:
        shown = walked.of_service(service)
        answers = await walked.answers(shown, walked.services[service])
        known = {at: answer for at, answer in answers.items() if at[0] in KNOW_SERVICES}
        assert wrong(known, {f"service:{service}"}, "PERMISSION_DENIED") == {}, service
        others = {at: answer for at, answer in answers.items() if at[0] not in KNOW_SERVICES}
        assert wrong(others, set(), "UNAUTHENTICATED") == {}, service
    for channels in (walked.people, walked.services["notifier"]):
        answers = await walked.answers(walked.of_service("agent-loop"), channels)
        assert wrong(answers, set(), "UNAUTHENTICATED") == {}


async def test_only_agent_loop_may_act_for_users_in_forwarded_methods(walked: Walked) -> None:
    """I13: other callers that name a user are refused by every method except health checks."""
    user = for_user(user_principal(StoreId("acme"), UserId("ann"), frozenset({"admin"})))
    for caller in ("admin", "deployment", "delegate-and-member"):
        assert wrong(await walked.answers((*key(caller), *user)), set(), "PERMISSION_DENIED") == {}, caller
    for service in LISTENERS:
        shown = (*walked.of_service(service), *user)
        for (listener, name), answer in (await walked.answers(shown, walked.services[service])).items():
            # agent-loop answers some of the forwarded methods itself.
            is_own = answer.code == "UNIMPLEMENTED" and is_forwarded((listener, name))
            if name in OPEN or listener not in KNOW_SERVICES or is_own:
                continue
            may = service == "agent-loop" and is_forwarded((listener, name))
            assert (answer.code == "PERMISSION_DENIED") != may, (service, listener, name, answer)


async def test_batch_follows_the_permission_table(walked: Walked) -> None:
    for listener in TAKE_BATCHES:
        names = [
            name
            for name, many in walked.methods[listener].items()
            if not many and not CALLERS.get(name, ROLES) & ROLES and not is_forwarded((listener, name))
        ]
        calls = [batch_pb2.Call(id=n, method=name) for n, name in enumerate(names, 1)]
        for service in ("agent-loop", "tool-registry", "notifier", "mailbox"):
            stub: Any = batch_pb2_grpc.BatchServiceStub(walked.services[service][listener])
            stream = stub.Batch(metadata=walked.of_service(service), timeout=60.0)
            await stream.write(batch_pb2.BatchRequest(calls=calls))
            reasons: dict[str, str] = {}
            while len(reasons) < len(names):
                message = await stream.read()
                reasons |= {names[reply.id - 1]: reply.failure.reason for reply in message.replies if reply.last}
            stream.cancel()
            refused = {name for name, reason in reasons.items() if reason == "PERMISSION_DENIED"}
            assert refused == {name for name in names if f"service:{service}" not in CALLERS[name]}, service


async def test_invalid_credential_is_refused_everywhere(walked: Walked) -> None:
    for how, shown in BAD.items():
        assert wrong(await walked.answers(shown), set(), "UNAUTHENTICATED") == {}, how


async def test_every_unknown_key_gets_the_same_answer(walked: Walked) -> None:
    """The answer does not reveal which keys, users or methods exist."""
    reported = set()
    for unknown in UNKNOWN.values():
        answers = await walked.answers(bearer(unknown))
        assert wrong(answers, set(), "UNAUTHENTICATED") == {}
        reported |= {answer for (_, name), answer in answers.items() if name not in OPEN}
    assert len(reported) == 1


async def test_revoked_expired_and_foreign_keys_are_refused(walked: Walked) -> None:
    stub: Any = KeyServiceStub(walked.people["job-store"])
    soon = Timestamp()
    soon.FromMilliseconds(int(time.time() * 1000) + 1500)
    made = {
        name: await stub.CreateKey(
            key_pb2.CreateKeyRequest(
                key=key_pb2.Key(name=name, store_id="acme", user_id="ann", roles=[role], expire_time=expire_time)
            ),
            metadata=key("deployment"),
        )
        for name, role, expire_time in (("live", "viewer", None), ("revoked", "admin", None), ("old", "admin", soon))
    }

    async def is_right(secret: str, callers: set[str], refusal: str) -> bool:
        return not wrong(await walked.answers(bearer(secret)), callers, refusal)

    await until(lambda: is_right(made["live"].secret, {"viewer"}, "PERMISSION_DENIED"))
    await stub.RevokeKey(key_pb2.RevokeKeyRequest(key_id=made["revoked"].key.key_id), metadata=key("deployment"))
    reported = set()
    for secret in (made["revoked"].secret, made["old"].secret, secret_of(bytes(32)), UNKNOWN["short"]):
        await until(lambda secret=secret: is_right(secret, set(), "UNAUTHENTICATED"))  # type: ignore[misc]
        answers = await walked.answers(bearer(secret))
        reported |= {answer for (_, name), answer in answers.items() if name not in OPEN}
    assert len(reported) == 1
