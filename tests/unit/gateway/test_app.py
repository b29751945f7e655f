"""HTTP endpoints: authentication, cross-origin access, and incoming webhooks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any, cast

import grpc
import httpx2
import pytest
from pydantic import SecretStr

from pawl.agent.v1.trigger_pb2 import DeliverWebhookRequest, DeliverWebhookResponse
from pawl.agent.v1.whoami_pb2 import WhoAmIResponse
from pawl.chassis.ids import IdSource
from pawl.errors import ChannelNotFound, DependencyUnavailable
from pawl.event.v1 import schedule_pb2
from pawl.event.v1.schedule_pb2 import ScheduleFire
from pawl.gateway.login.session import Seal, Session
from pawl.gateway.services import PEERS
from pawl.gateway.settings import GatewaySettings
from pawl.gateway.web.hosts import check_host
from pawl.gateway.wiring import wire
from pawl.notify.v1.channel_pb2 import UnsubscribeChannelResponse
from pawl.server.identity.browser_seal import CODE_SECONDS, Code, close
from pawl.server.process.http_server import Response
from pawl.server.process.metrics import Metrics
from pawl.server.process.settings import SettingsError, read
from tests.fakes.manual_clock import ManualClock
from tests.tables import for_each
from tests.unit.gateway.conftest import Listener

SEAL = "s" * 32
HOST = "pawl.example.com"
PAGE = "https://app.example.com"
BEARER = {"authorization": "Bearer key"}
ANY = {"threadId": "t", "runId": "r", "messages": []}
WHO = "/rpc/pawl.agent.v1.AgentService/WhoAmI"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


@dataclass
class Channel:
    """A channel that answers only WhoAmI and UnsubscribeChannel, and webhooks if `webhooks` is a list.

    It records timeouts and the metadata of the last call.
    """

    timeouts: list[float] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    webhooks: list[DeliverWebhookRequest] | None = None
    who: WhoAmIResponse = field(default_factory=WhoAmIResponse)
    delivered: DeliverWebhookResponse = field(default_factory=DeliverWebhookResponse)
    links: dict[str, bool] = field(default_factory=lambda: {"good": True, "bad": False})

    def unary_unary(self, name: str, **_: object) -> Any:
        async def call(request: Any, *_: object, timeout: float = 0.0, metadata: Any = (), **__: object) -> object:
            self.timeouts.append(timeout)
            self.metadata = dict(metadata)
            if name.endswith("/DeliverWebhook") and self.webhooks is not None:
                self.webhooks.append(request)
                return self.delivered
            if name.endswith("/UnsubscribeChannel") and request.token in self.links:
                if not self.links[request.token]:
                    raise ChannelNotFound
                return UnsubscribeChannelResponse()
            if name.endswith("/WhoAmI"):
                return self.who
            raise DependencyUnavailable

        return call

    unary_stream = unary_unary


class Browser:
    def __init__(
        self, *, origins: str = "", health: Response | None = None, listener: Listener | None = None, **settings: Any
    ) -> None:
        self.listener = listener or Listener()
        self.clock = ManualClock()
        self.channel = Channel()
        self.app = wire(
            GatewaySettings(
                gateway_seal_key=SecretStr(SEAL),
                gateway_hosts=HOST,
                gateway_origins=origins,
                **{"gateway_session_hours": 1 / 60} | settings,
            ),
            cast("dict[str, grpc.aio.Channel]", dict.fromkeys(PEERS, self.channel)),
            closing=asyncio.Event(),
            health=lambda: health or Response(body=b"{}"),
            metrics=Metrics("gateway"),
            clock=self.clock,
            ids=IdSource(self.clock),
        )

    async def ask(
        self, method: str, path: str, *, at: str = "http://localhost:7600", cookies: Any = None, **more: Any
    ) -> httpx2.Response:
        transport = httpx2.ASGITransport(app=self.app)
        async with httpx2.AsyncClient(transport=transport, base_url=at, cookies=cookies) as browser:
            return await browser.request(method, path, **more)

    async def cookie(self, at: str) -> Any:
        answer = await self.ask("POST", "/login", at=at, json={"key": "key"}, headers={"origin": at})
        assert answer.status_code == 200, answer.text
        (cookie,) = SimpleCookie(answer.headers["set-cookie"]).values()
        return cookie


@for_each(
    ("waits", "header", "seconds"),
    [
        (None, None, 15),
        (20, None, 35),
        ("Infinity", None, 75),
        (-5, None, 15),
        ("NaN", None, 75),
        (20, "500", 0.5),
    ],
)
async def test_a_call_that_waits_for_a_run_has_a_longer_timeout(waits: Any, header: str | None, seconds: float) -> None:
    browser = Browser()
    asked = {"runId": "run"} | ({} if waits is None else {"waitSeconds": waits})
    headers = BEARER | ({} if header is None else {"connect-timeout-ms": header})
    await browser.ask("POST", "/rpc/pawl.agent.v1.AgentService/GetRun", json=asked, headers=headers)
    assert browser.channel.timeouts == [seconds]


async def test_only_the_gateway_sets_the_client_address() -> None:
    browser, lie = Browser(service_key=SecretStr("of the gateway")), {"pawl-client-address": "ipv4:192.0.2.1:1"}
    await browser.ask("POST", WHO, json={}, headers=BEARER | lie)
    shown = {"pawl-gateway-key": "of the gateway", "pawl-client-address": "ipv4:127.0.0.1:123"}
    assert browser.channel.metadata == {"authorization": "Bearer key"} | shown


def reason(answer: httpx2.Response) -> str:
    found: str = answer.json()["details"][0]["debug"]["reason"]
    return found


def cors_headers(answer: httpx2.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


@for_each("path", ["/agui", "/agui/cancel"])
async def test_a_page_from_an_allowed_origin_may_use_ag_ui(path: str) -> None:
    browser = Browser(origins=PAGE)
    asked = await browser.ask("OPTIONS", path, headers=PREFLIGHT | {"origin": PAGE})
    cors = cors_headers(asked)
    allowed = {name.strip().lower() for name in cors.pop("access-control-allow-headers").split(",")}
    assert allowed >= {"authorization", "content-type", "pawl-store", "pawl-user"}
    assert (asked.status_code, cors["access-control-allow-methods"]) == (200, "POST")
    refused = await browser.ask("POST", path, json=ANY, headers={"origin": PAGE})
    assert (refused.status_code, cors_headers(refused)) == (401, {"access-control-allow-origin": PAGE})
    assert (cors["access-control-allow-origin"], "access-control-allow-credentials" in cors) == (PAGE, False)
    assert refused.headers["vary"] == "Origin"


@for_each("origins", ["", "https://other.example.com"])
async def test_pages_from_other_origins_cannot_read_responses(origins: str) -> None:
    for origin in [PAGE, "null", "https://app.example.com.evil.com", "http://app.example.com"]:
        browser = Browser(origins=origins)
        asked = await browser.ask("OPTIONS", "/agui", headers=PREFLIGHT | {"origin": origin})
        refused = await browser.ask("POST", "/agui", json=ANY, headers=BEARER | {"origin": origin})
        assert asked.status_code in {400, 405}
        assert "access-control-allow-origin" not in {**asked.headers, **refused.headers}


@for_each("path", [WHO, "/stream", "/login", "/login/out", "/healthz", "/"])
async def test_endpoints_with_cookies_refuse_other_origins(path: Any) -> None:
    browser = Browser(origins=PAGE)
    for method in ("OPTIONS", "POST", "GET"):
        assert cors_headers(await browser.ask(method, path, headers=PREFLIGHT | {"origin": PAGE} | BEARER)) == {}


@for_each(
    ("at", "name", "secure"),
    [
        ("http://localhost:7600", "pawl_session_7600", False),
        ("https://localhost:7600", "__Host-pawl_session_7600", True),
        (f"http://{HOST}", "__Host-pawl_session", True),
        (f"https://{HOST}", "__Host-pawl_session", True),
    ],
)
async def test_the_cookie_is_bound_to_the_host_and_hidden_from_scripts(at: str, name: str, secure: bool) -> None:
    session = await Browser().cookie(at)
    assert (session.key, session["httponly"], session["samesite"]) == (name, True, "strict")
    assert (bool(session["secure"]), session["max-age"]) == (secure, "60")
    assert (session["path"], session["domain"]) == ("/", "")  # required by __Host-


async def test_a_code_logs_in_only_once_and_not_after_a_restart() -> None:
    browser = Browser()
    started = browser.clock.now()
    await browser.clock.advance(1.0)

    async def use(made: float) -> int:
        code = Code(key="key", gateway="localhost:7600", end_time=made + CODE_SECONDS, nonce=str(made))
        body = {"code": close(SEAL, code)}
        return (await browser.ask("POST", "/login", json=body, headers={"origin": "http://localhost:7600"})).status_code

    assert [await use(made) for made in (started - 1, started + 1, started + 1)] == [401, 200, 401]


async def test_an_expired_or_foreign_session_is_refused() -> None:
    browser, at = Browser(), "http://localhost:7600"
    session = await browser.cookie(at)

    async def ask(value: str) -> tuple[int, str]:
        answer = await browser.ask("POST", WHO, json={}, cookies={session.key: value}, headers={"origin": at})
        return answer.status_code, reason(answer) if answer.is_error else ""

    assert await ask(session.value) == (200, "")
    foreign = Seal("f" * 32).close(Session(key="key", end_time=browser.clock.now() + 60))
    assert await ask(foreign) == (401, "UNAUTHENTICATED")
    await browser.clock.advance(60.0)
    assert await ask(session.value) == (401, "SESSION_EXPIRED")


@for_each("name", ["authorization", "pawl-store", "pawl-user"])
async def test_a_repeated_identity_header_is_refused(name: str) -> None:
    """An attacker may have sent the first header, and a proxy may have added the second."""
    for path in [WHO, "/agui"]:
        headers = [*({"pawl-store": "s", "pawl-user": "u"} | BEARER).items(), (name, "Bearer other")]
        answer = await Browser().ask("POST", path, json={}, headers=headers)
        assert (answer.status_code, reason(answer)) == (400, "INVALID_FIELD")
        assert answer.json()["message"] == f"The header {name} must not be repeated."


START = "/rpc/pawl.agent.v1.AgentService/StartRun"
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 401, "UNAUTHENTICATED"),
    ({"cookies": {"pawl_session_7600": "gAAAAABmade-up"}}, 401, "UNAUTHENTICATED"),
    ({"headers": {"authorization": b"Bearer \xe9"}}, 400, "INVALID_FIELD"),
    ({"headers": BEARER | {"pawl-user": "a\tb"}}, 400, "INVALID_FIELD"),
    ({"headers": {"origin": "http://evil.com"}, "cookies": {"pawl_session_7600": "x"}}, 403, "FOREIGN_ORIGIN"),
    ({"headers": BEARER | {"host": "evil.com"}}, 421, "FOREIGN_HOST"),
    ({"headers": BEARER | {"content-type": "text/plain"}}, 400, "INVALID_FIELD"),
    ({"headers": BEARER, "content": b'{"text": "\xff"}'}, 400, "INVALID_JSON"),
    ({"headers": BEARER, "content": b'{"nope": 1}'}, 400, "INVALID_FIELD"),
    ({"headers": BEARER, "content": b"[" * 100_000 + b"]" * 100_000}, 400, "INVALID_JSON"),
    ({"headers": BEARER, "content": b" " * 2_000_000}, 413, "TOO_LARGE"),
    ({"headers": BEARER, "path": "/rpc/pawl.tool.v1.ExecutionService/CheckCalls"}, 404, "METHOD_NOT_FOUND"),
    ({"headers": BEARER, "path": "/rpc/pawl.agent.v1.AgentService/WatchRun"}, 404, "METHOD_NOT_FOUND"),
    ({"headers": BEARER, "path": "/nothing"}, 404, "METHOD_NOT_FOUND"),
    ({"headers": BEARER, "method": "GET", "path": "/runs/nope..nope/events"}, 400, "INVALID_ID"),
    ({"headers": BEARER | {"last-event-id": "soon"}, "method": "GET", "path": "/runs/r/events"}, 400, "INVALID_FIELD"),
    ({"headers": BEARER, "path": "/stream", "content": b'{"subscriptions": 3}'}, 400, "INVALID_FIELD"),
    ({"headers": BEARER, "path": "/stream", "content": b'{"subscriptions": {}}'}, 400, "INVALID_FIELD"),
    ({"path": "/login", "content": b'{"key": ""}'}, 400, "INVALID_FIELD"),
    ({"path": "/login", "content": b'{"key": "k", "x": 1}'}, 400, "INVALID_FIELD"),
    ({"path": "/login", "content": b'{"key": "k", "store": "a\\n"}'}, 400, "INVALID_FIELD"),
]


@for_each(("row", "status", "why"), REFUSED)
async def test_a_bad_request_gets_a_json_error_and_never_reaches_a_service(row: Any, status: Any, why: Any) -> None:
    """LOOP-15, OPS-1: the response sets no cookie."""
    browser = Browser()
    headers = {"content-type": "application/json", "origin": "http://localhost:7600"} | row.get("headers", {})
    content = row.get("content", b"{}")
    method, path = row.get("method", "POST"), row.get("path", START)
    answer = await browser.ask(method, path, headers=headers, content=content, cookies=row.get("cookies"))
    assert (answer.status_code, reason(answer), browser.channel.timeouts) == (status, why, [])
    assert "set-cookie" not in answer.headers
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_the_console_page_has_a_strict_content_security_policy() -> None:
    page = await Browser().ask("GET", "/")
    assert dict(each.strip().partition(" ")[::2] for each in page.headers["content-security-policy"].split(";")) == {
        **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"), "'none'"),
        **dict.fromkeys(("script-src", "style-src", "connect-src"), "'self'"),
        "img-src": "'self' data:",
        "require-trusted-types-for": "'script'",
    }
    data = await Browser().ask("POST", WHO, json={}, headers=BEARER)
    assert (page.headers["x-dns-prefetch-control"], data.headers["cache-control"]) == ("off", "no-store")
    assert data.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'; sandbox"
    common = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    common["cross-origin-resource-policy"] = "same-origin"
    for answer in (page, data):
        assert common.items() <= dict(answer.headers).items()


@for_each(
    ("method", "path", "allowed"),
    [
        ("GET", WHO, "POST"),
        ("GET", "/rpc/no.such.Service/Method", "POST"),
        ("DELETE", WHO, "POST"),
        ("GET", "/stream", "POST"),
        ("POST", "/runs/run_1/events", "GET, HEAD"),
        ("PUT", "/unsubscribe/store/token", "GET, HEAD, POST"),
    ],
)
async def test_the_error_for_a_wrong_method_names_the_allowed_one(method: str, path: Any, allowed: str) -> None:
    """Otherwise a GET would show the console, which serves all other addresses."""
    answer = await Browser().ask(method, path, headers={"accept": "text/html"})
    assert (answer.status_code, answer.headers["allow"], reason(answer)) == (405, allowed, "METHOD_NOT_FOUND")
    assert answer.json()["message"] == f"{method} is not allowed here. Use {allowed}."


BAD = (
    "*",
    "app.example.com",
    "https://app.example.com/",
    "https://*.example.com",
    "https://u@a.b",
    "ftp://a.b",
    "null",
)


@for_each(
    ("variables", "says"),
    [
        *(({"PAWL_GATEWAY_SEAL_KEY": keys}, "PAWL_GATEWAY_SEAL_KEY") for keys in ("short", "," * 40, f"{SEAL}, short")),
        ({"PAWL_LISTEN": "0.0.0.0:7600"}, "PAWL_GATEWAY_HOSTS is required"),
        ({"PAWL_LISTEN": "[::]:7600"}, "PAWL_GATEWAY_HOSTS is required"),
        ({"PAWL_LISTEN": "0.0.0.0:7600", "PAWL_GATEWAY_HOSTS": HOST, "PAWL_LOCAL_KEY": "k" * 16}, "PAWL_LOCAL_KEY"),
        ({"PAWL_GATEWAY_HOSTS": "*.example.com"}, "PAWL_GATEWAY_HOSTS"),
        ({"PAWL_GATEWAY_HOSTS": HOST, "PAWL_GATEWAY_OIDC_FILE": "logins.json"}, "PAWL_PUBLIC_URL is required"),
        *(({"PAWL_GATEWAY_ORIGINS": f"https://a.b, {origin}"}, "PAWL_GATEWAY_ORIGINS") for origin in BAD),
        ({"PAWL_GATEWAY_ORIGINS": "https://a.b:443"}, "PAWL_GATEWAY_ORIGINS"),
    ],
)
async def test_insecure_settings_are_refused(monkeypatch: pytest.MonkeyPatch, variables: Any, says: str) -> None:
    with monkeypatch.context() as environment, pytest.raises(SettingsError, match=says):
        for name, value in ({"PAWL_GATEWAY_SEAL_KEY": SEAL} | variables).items():
            environment.setenv(name, value)
        read(GatewaySettings)


async def test_hosts_and_origins_are_comma_separated_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAWL_LISTEN", "0.0.0.0:7600")
    monkeypatch.setenv("PAWL_GATEWAY_SEAL_KEY", SEAL)
    monkeypatch.setenv("PAWL_GATEWAY_HOSTS", f"{HOST}, B.c,[FD00::1],fd00::2")
    monkeypatch.setenv("PAWL_GATEWAY_ORIGINS", f"{PAGE.upper()},http://[::1]:3000")
    found = read(GatewaySettings)
    assert found.hosts == {HOST, "b.c", "fd00::1", "fd00::2"}
    check_host("[fd00::1]:7600", found.hosts)
    assert found.origins == {PAGE, "http://[::1]:3000"}


@for_each("store", ["of-nobody", "no.id"])
async def test_a_store_without_a_key_has_no_public_endpoints(tmp_path: Path, store: str) -> None:
    """Services are unavailable in this test, so a store with a key gets 503."""
    reasons = {"/hooks": "TRIGGER_NOT_FOUND", "/completions": "COMPLETION_NOT_FOUND", "/unsubscribe": ""}
    for path, expected in reasons.items():
        keys = tmp_path / "keys.json"
        keys.write_text('{"of-somebody": "key"}', encoding="utf-8")
        browser = Browser(gateway_webhook_keys_file=keys)
        body = {"error": "it broke"}
        assert (await browser.ask("POST", f"{path}/of-somebody/token", json=body)).status_code == 503
        refused = await browser.ask("POST", f"{path}/{store}/token", json=body)
        assert refused.status_code == 404
        assert not expected or reason(refused) == expected


GIVEN = {
    "Host": "localhost",
    "Content-Type": "application/json",
    "Content-Length": "12",
    "Authorization": "Bearer whsec_1",
    "Webhook-Id": "msg_1",
    "Webhook-Timestamp": "1800000000",
    "Webhook-Signature": "v1,a v1,b",
}


@pytest.fixture
def browser(tmp_path: Path, listener: Listener) -> Browser:
    keys = tmp_path / "keys.json"
    keys.write_text('{"acme": "key"}', encoding="utf-8")
    return Browser(listener=listener, gateway_webhook_keys_file=keys)


@pytest.mark.parametrize("listener", ["http"], indirect=True)
async def test_an_unsubscribe_link_asks_for_confirmation_but_one_click_unsubscribing_does_not(browser: Browser) -> None:
    """NOTE-1: otherwise mail scanners, which follow links, would unsubscribe users."""
    page = await browser.ask("GET", "/unsubscribe/acme/good", headers={"accept": "text/html"})
    assert (page.status_code, '<form method="post">' in page.text, browser.channel.timeouts) == (200, True, [])
    for token, status, text in (
        ("good", 200, "You are unsubscribed"),
        ("bad", 404, "Invalid link"),
        ("x" * 300, 404, "Invalid link"),
        ("other", 503, "Something went wrong"),
    ):
        answer = await browser.ask("POST", f"/unsubscribe/acme/{token}", data={"List-Unsubscribe": "One-Click"})
        assert (answer.status_code, text in answer.text) == (status, True), token


@pytest.fixture
def webhooks(browser: Browser) -> list[DeliverWebhookRequest]:
    browser.channel.webhooks = []
    return browser.channel.webhooks


async def sent(browser: Browser, *more: tuple[str, str], order: int = 7) -> bytes:
    head = "".join(f"{name}: {value}\r\n" for name, value in (*GIVEN.items(), *more, ("Connection", "close")))
    async with browser.listener.serve(browser.app) as server, asyncio.timeout(60):
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=browser.listener.trusting)
        writer.write(f'POST /hooks/acme/trg_1 HTTP/1.1\r\n{head}\r\n{{"order": {order}}}'.encode())
        answer = await reader.read()
        writer.close()
    return answer


async def test_identical_bodies_without_an_event_id_are_the_same_event(
    browser: Browser, webhooks: list[DeliverWebhookRequest]
) -> None:
    for order in (7, 7, 8):
        await sent(browser, order=order)
    first, again, other = (webhook.request_id for webhook in webhooks)
    assert first == again != other


async def test_a_refused_event_gets_an_error_status(browser: Browser, webhooks: list[DeliverWebhookRequest]) -> None:
    """An error status makes the sender deliver the event again."""
    for reason, status in (("QUEUE_FULL: 100 wait", 429), ("PERMISSION_DENIED: no", 403), ("SOMETHING: else", 503)):
        fire = ScheduleFire(outcome=schedule_pb2.SCHEDULE_FIRE_OUTCOME_REFUSED, reason=reason)
        browser.channel.delivered = DeliverWebhookResponse(fire=fire)
        assert (await sent(browser)).startswith(f"HTTP/1.1 {status} ".encode()), reason
    assert len(webhooks) == 3


async def test_headers_added_by_proxies_are_joined_in_order(
    browser: Browser, webhooks: list[DeliverWebhookRequest]
) -> None:
    added = [
        ("X-Forwarded-For", "192.0.2.1"),
        ("Via", "1.1 one"),
        ("x-forwarded-for", "192.0.2.2, 192.0.2.3"),
        ("Accept", "*/*"),
        ("VIA", "1.1 two"),
        ("accept", "text/html"),
        ("Cookie", "a=1"),
        ("Cookie", "b=2"),
    ]
    assert b" 200 " in (await sent(browser, *added)).splitlines()[0]
    (webhook,) = webhooks
    assert webhook.body == b'{"order": 7}'
    assert dict(webhook.headers) == {
        **{name.lower(): value for name, value in GIVEN.items()},
        "x-forwarded-for": "192.0.2.1, 192.0.2.2, 192.0.2.3",
        "via": "1.1 one, 1.1 two",
        "accept": "*/*, text/html",
        "cookie": "a=1; b=2",
        "connection": "close",
    }


async def test_repeated_webhook_security_headers_are_refused(
    browser: Browser, webhooks: list[DeliverWebhookRequest]
) -> None:
    for name in ("Authorization", "Content-Type", "Webhook-Id", "Webhook-Signature", "webhook-timestamp"):
        for value in ("another", GIVEN[name.title()]):
            answer = await sent(browser, (name, value))
            assert b" 400 " in answer.splitlines()[0]
            assert f"The header {name.lower()} must not be repeated.".encode() in answer
    for name, value in {"Host": "localhost", "Content-Length": "3", "Transfer-Encoding": "chunked"}.items():
        assert b" 400 " in (await sent(browser, (name, value))).splitlines()[0], name
    assert webhooks == []


async def test_a_request_with_two_content_lengths_closes_the_connection(browser: Browser) -> None:
    """A proxy may have treated the rest as part of the body."""
    inner = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(inner) + 5}\r\n"
    async with browser.listener.serve(browser.app) as server, asyncio.timeout(60):
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=browser.listener.trusting)
        writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner)
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1


async def test_login_state_shows_problems_only_with_a_session(tmp_path: Path) -> None:
    at, file = "http://localhost:7600", tmp_path / "run" / "problems.json"
    browser = Browser(data=tmp_path)
    cookie = await browser.cookie(at)

    async def state(**headers: str) -> Any:
        return (await browser.ask("GET", "/login/state", headers=headers, cookies={cookie.key: cookie.value})).json()

    file.parent.mkdir()
    assert await state() == {"session": True}
    file.write_text('["tools.stock: error"]')
    assert await state() == {"session": True, "problems": ["tools.stock: error"]}
    assert (await state(**{"sec-fetch-site": "cross-site"}))["code"] == "permission_denied"
    assert (await browser.ask("GET", "/login/state")).json() == {"session": False}
