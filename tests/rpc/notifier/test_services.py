"""Deliveries by services of Apprise, whose plug-ins reach nothing but what the guard allows (NOTE-1)."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
import requests
import trustme

from pawl.chassis.auth import Principal
from pawl.chassis.clock import SystemClock
from pawl.chassis.egress import GuardedEgress
from pawl.chassis.egress_rules import read_rules
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.lookups import Lookups
from pawl.errors import InvalidField
from pawl.notifier.adapters import apprise_sender
from pawl.notifier.adapters.apprise_sender import AppriseServices
from pawl.notifier.adapters.postgres import PostgresStore
from pawl.notifier.domain.channel import OWN_SERVICES, SERVICES, ChannelId
from pawl.notifier.domain.delivery import TEST, Attempt, Candidate, DeliveryId, Outcome, body_of_own
from pawl.notifier.domain.notification import Draft, Inbox
from pawl.notify.v1 import channel_pb2 as pb
from tests.poll import until
from tests.rpc.notifier.desk import ANN, DELIVERED, WAITING, Desk, created
from tests.rpc.notifier.test_inbox import reason_of
from tests.web_server import Names, Reply, WebServer, web_server

Drafts = Callable[..., Draft]
SECRET = "hunter2hunter2"
DISCORD = f"discord://{'1' * 18}/{'a' * 64}"


def url_to(receiver: WebServer, rest: str = "/", *, scheme: str = "json", host: str = "127.0.0.1") -> str:
    return f"{scheme}://ann:{SECRET}@{host}:{receiver.port}{rest}"


def services(*opened: str, tls: ssl.SSLContext | None = None) -> AppriseServices:
    """All services, and a way out that leads to the public internet and to what is opened."""
    names = Names({"public.test": ["93.184.216.34"], "inside.test": ["127.0.0.1"]})
    egress = GuardedEgress(
        {"*": read_rules(None, opened)},
        lookups=Lookups(names),
        tls=tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    return AppriseServices(SERVICES | OWN_SERVICES, egress, SystemClock())


async def told(apprise: AppriseServices, url: str) -> Outcome:
    """What comes of a try."""
    inbox = Inbox(store_id=StoreId("acme"), user_id=UserId("ann"))
    channel_id, now = ChannelId("svc_1"), datetime.now(UTC)
    candidate = Candidate(
        delivery_id=DeliveryId("dlv_1"), channel_id=channel_id, inbox=inbox, host="", is_failing=False
    )
    body = body_of_own(TEST, inbox, channel_id, now)
    attempt = Attempt(
        candidate=candidate,
        url=url,
        secrets=[b"s"],
        type=TEST,
        body=body,
        tries=1,
        claim_until=now,
        saved_by=Principal(),
    )
    outcome = await apprise.send(attempt)
    await apprise.rest(attempt)
    assert SECRET not in outcome.message
    return outcome


async def test_a_service_is_told_as_a_webhook_is_and_its_url_is_shown_to_nobody(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer
) -> None:
    made = await created(desk.stub, url_to(receiver), name="my desk")
    channel_id = made.channel.channel_id
    assert (made.channel.url, made.channel.enabled, made.secret) == ("json://...", True, "")
    receiver.answer = lambda _: Reply(status=503)
    await store.add([draft("a", body="It is <391>.")])
    waits = await desk.delivery(channel_id, tries=1)
    assert (waits.state, waits.status, waits.last_error) == (WAITING, 503, "the receiver answered 503")
    receiver.answer = lambda _: Reply()
    await desk.hurry()
    assert (await desk.delivery(channel_id, tries=2)).state == DELIVERED
    first, second = receiver.asked
    assert first.body == second.body
    said = json.loads(first.body)
    assert said["title"] == "About a"
    assert said["message"].startswith("It is <391>.\n")
    assert first.headers["authorization"].startswith("Basic ")
    updated = await desk.change(channel_id, name="x", url=url_to(receiver, "/other"))
    listed = (await desk.stub.ListChannels(pb.ListChannelsRequest(), metadata=ANN)).channels[0]
    assert updated.url == listed.url == (await desk.channel(channel_id)).url == "json://..."
    rotate = desk.stub.RotateChannelSecret(pb.RotateChannelSecretRequest(channel_id=channel_id), metadata=ANN)
    assert await reason_of(rotate) == "INVALID_FIELD"


async def test_what_the_deployment_does_not_allow_is_refused(desk: Desk) -> None:
    channel_id = (await created(desk.stub, DISCORD)).channel.channel_id
    for url in [
        "syslog://localhost",
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/",
        "mailtos://ann:x@example.com",
        "json://",
        "discord://a",
        f"{DISCORD}?template=/etc/passwd",
        f"{DISCORD}?template=http://127.0.0.1/x",
    ]:
        assert await reason_of(created(desk.stub, url)) == "INVALID_FIELD", url
        assert await reason_of(desk.change(channel_id, url=url)) == "INVALID_FIELD", url


async def test_what_the_guard_refuses_gets_no_packet(receiver: WebServer) -> None:
    for scheme in ("json", "jsons", "form", "gotify", "ntfy", "mmosts"):
        for host in ("127.0.0.1", "inside.test", "[::1]", "2130706433"):
            outcome = await told(services(), url_to(receiver, "/token/a", scheme=scheme, host=host))
            assert (outcome.is_success, receiver.connections) == (False, 0), (scheme, host)


async def test_secrets_do_not_go_out_in_the_clear() -> None:
    outcome = await told(services(), f"json://ann:{SECRET}@public.test/")
    assert "secrets are not sent to public.test" in outcome.message


async def test_a_redirect_leads_to_nothing_that_the_guard_refuses(receiver: WebServer) -> None:
    async with web_server(lambda _: Reply()) as other:
        receiver.answer = lambda _: Reply(status=302, headers={"Location": f"http://127.0.0.1:{other.port}/"})
        for count, method in enumerate(("POST", "GET"), start=1):
            outcome = await told(services(f"127.0.0.1:{receiver.port}"), url_to(receiver, f"/?method={method}"))
            assert not outcome.is_success
            assert (receiver.connections, other.connections) == (count, 0)


async def test_certificates_are_checked_whatever_the_url_says() -> None:
    authority = trustme.CA()
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(theirs)
    ours = ssl.create_default_context()
    authority.configure_trust(ours)
    async with web_server(lambda _: Reply(), tls=theirs) as receiver:
        opened = f"localhost:{receiver.port}"
        url = f"jsons://{opened}/?verify=no"
        names = Lookups(Names({"localhost": ["127.0.0.1"]}))
        for tls, is_good in ((ours, True), (ssl.create_default_context(), False)):
            egress = GuardedEgress({"*": read_rules(None, [opened])}, lookups=names, tls=tls)
            outcome = await told(AppriseServices(OWN_SERVICES, egress, SystemClock()), url)
            assert outcome.is_success is is_good
        assert len(receiver.asked) == 1


async def test_a_service_that_hangs_holds_up_no_other(receiver: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apprise_sender, "TRY_SECONDS", 5.0)
    receiver.answer = lambda asked: Reply(waits=asked.target == "/hangs")
    apprise = services(f"127.0.0.1:{receiver.port}")
    hanging = [asyncio.create_task(told(apprise, url_to(receiver, "/hangs"))) for _ in range(20)]
    await until(lambda: len(receiver.asked) == 20)
    assert (await told(apprise, url_to(receiver))).is_success
    assert not any(each.done() for each in hanging)
    for each in hanging:
        assert "within" in (await each).message or "in time" in (await each).message


async def test_what_is_not_the_request_of_a_try_goes_nowhere(receiver: WebServer) -> None:
    await services().check(DISCORD)
    with pytest.raises(requests.ConnectionError):
        await asyncio.to_thread(requests.get, f"http://127.0.0.1:{receiver.port}/", timeout=1)
    assert receiver.connections == 0


async def test_every_service_that_may_be_allowed_is_one_of_apprise() -> None:
    """One that the library has no more would be refused to everybody."""
    import apprise  # noqa: PLC0415  # as lazily as the service does

    for scheme in SERVICES | OWN_SERVICES:
        assert scheme in apprise.plugins.N_MGR


async def test_a_url_that_nobody_can_read_is_refused() -> None:
    for url in ("json://[", "json://\x00", "json://" + "a" * 2000, "json://a b/", "gotify://h"):
        with pytest.raises(InvalidField):
            await services().check(url)
