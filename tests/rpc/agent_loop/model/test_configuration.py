"""What people configure for the openai client holds for calls that go round it."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from contextlib import aclosing
from pathlib import Path

import pytest
import trustme

from pawl.agent_loop.adapters.model import direct
from pawl.agent_loop.adapters.model.client import OpenAiModel
from pawl.agent_loop.domain.model import Finished, ModelError, ModelRequest, Piece, Problem, TextPiece
from tests.rpc.agent_loop.model.model_http import Exchange, answer, model_http

ANSWER = [TextPiece(text="Hi"), Finished(reason="stop")]
REQUEST = ModelRequest(model="m", messages=({"role": "user", "content": "Hello"},))


async def collect(model: OpenAiModel) -> list[Piece]:
    async with aclosing(model.stream(REQUEST)) as pieces:
        return [piece async for piece in pieces]


async def fail(model: OpenAiModel) -> Problem:
    with pytest.raises(ModelError) as caught:
        await collect(model)
    return caught.value.problem


def fields(exchange: Exchange) -> dict[str, str]:
    lines = exchange.head.strip().split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def test_a_call_looks_as_if_the_client_had_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of the head, with all that the client takes from the environment."""
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-1")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Team: blue")
    async with model_http(answer) as server, OpenAiModel(base_url=server.url + "/", api_key="sk-1") as model:
        await collect(model)
        await collect(model)
        ours = server.exchanges[1]
        await (await model._post(json.dumps(ours.body, separators=(",", ":")).encode())).aclose()
        theirs = server.exchanges[2]
    assert ours.head.split("\r\n")[0] == theirs.head.split("\r\n")[0] == "POST /v1/chat/completions HTTP/1.1"
    assert fields(ours) == fields(theirs)
    expected = {
        "authorization": "Bearer sk-1",
        "openai-organization": "org-1",
        "openai-project": "proj-1",
        "x-team": "blue",
        "accept-encoding": "identity",
        "content-type": "application/json",
    }
    assert fields(ours).items() >= expected.items()


async def test_a_key_cannot_write_headers() -> None:
    async with model_http(answer) as server, OpenAiModel(base_url=server.url, api_key="sk-1\r\nX-Evil: 1") as model:
        error = await fail(model)
        assert (error.reason, server.exchanges) == ("NETWORK", [])
        assert "sk-1" not in str(error)


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://127.0.0.1/v1", "http://127.0.0.1:9/v1", "http://no.invalid/v1"])
async def test_an_address_that_leads_nowhere_is_a_network_failure(url: str) -> None:
    async with OpenAiModel(base_url=url or "/", api_key="") as model:
        assert (await fail(model)).reason == "NETWORK"


async def test_a_redirected_call_goes_where_it_is_sent() -> None:
    async def moved(exchange: Exchange) -> None:
        await exchange.respond(307, headers=f"Location: {new.url}/chat/completions\r\n")

    async with (
        model_http(answer) as new,
        model_http(moved) as old,
        OpenAiModel(base_url=old.url, api_key="sk-1") as model,
    ):
        assert [await collect(model) for _ in range(3)] == [ANSWER] * 3
        assert [exchange.body["model"] for exchange in new.exchanges] == ["m"] * 3


async def test_a_redirection_to_nowhere_is_an_answer_that_is_no_success() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.respond(304)

    async with model_http(script) as server, OpenAiModel(base_url=server.url, api_key="") as model:
        assert [(await fail(model)).reason for _ in range(2)] == ["HTTP_304"] * 2


async def test_cookies_come_back_to_the_server() -> None:
    """Load balancers choose by them."""

    async def script(exchange: Exchange) -> None:
        cookie = "" if "cookie" in fields(exchange) else "Set-Cookie: node=7; Path=/\r\n"
        body = json.dumps({"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}]})
        await exchange.respond(200, body, cookie)

    async with model_http(script) as server, OpenAiModel(base_url=server.url, api_key="") as model:
        assert [await collect(model) for _ in range(3)] == [ANSWER] * 3
        assert [fields(exchange).get("cookie") for exchange in server.exchanges] == [None, "node=7", "node=7"]
        assert server.connections == 1


async def test_a_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with model_http(answer) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1"))
        async with OpenAiModel(base_url="http://model.invalid/v1", api_key="sk-1") as model:
            assert [await collect(model) for _ in range(2)] == [ANSWER] * 2
        heads = [exchange.head for exchange in proxy.exchanges]
        assert [head.split()[1] for head in heads] == ["http://model.invalid/v1/chat/completions"] * 2


@pytest.mark.parametrize("exceptions", ["127.0.0.1", "localhost, 127.0.0.1", "*"])
async def test_a_server_beside_the_proxy_is_met_directly(monkeypatch: pytest.MonkeyPatch, exceptions: str) -> None:
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", exceptions)
    async with model_http(answer) as server, OpenAiModel(base_url=server.url, api_key="") as model:
        assert await collect(model) == ANSWER
        assert model._direct._pool is not None


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_context(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


async def test_a_server_whose_authority_is_trusted_is_met_over_tls(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    async with (
        model_http(answer, tls=server_context(authority)) as server,
        OpenAiModel(base_url=server.url, api_key="") as model,
    ):
        assert [await collect(model) for _ in range(3)] == [ANSWER] * 3
        assert model._direct._pool is not None
        assert server.connections == 1
        # Ends in one step too when the connection is lost under it.
        assert await asyncio.gather(*(collect(model) for _ in range(20))) == [ANSWER] * 20


async def test_a_server_that_is_not_trusted_gets_no_request(authority: trustme.CA) -> None:
    async with (
        model_http(answer, tls=server_context(authority)) as server,
        OpenAiModel(base_url=server.url, api_key="") as model,
    ):
        assert (await fail(model)).reason == "NETWORK"
        assert not server.exchanges


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'{"error":{"message":"Bad sk-secret"}}', ": Bad ***."),
        (b'{"message":"Bad"}', ": Bad."),
        (b'{"error":"Bad"}', ": Bad."),
        (b'["Bad"]', ": Bad."),
        (b"Bad", ": Bad."),
        (b"\xff", "."),
        (b"", "."),
    ],
)
@pytest.mark.parametrize("encoding", ["identity", "gzip", "none at all"])
async def test_the_words_of_a_refusal_are_passed_on(body: bytes, detail: str, encoding: str) -> None:
    async def script(exchange: Exchange) -> None:
        name = "gzip" if encoding == "none at all" else encoding
        sent = gzip.compress(body) if encoding == "gzip" else body
        head = f"HTTP/1.1 400 Bad\r\nContent-Encoding: {name}\r\nContent-Length: {len(sent)}\r\n\r\n"
        await exchange.send(head, sent)

    async with model_http(script) as server, OpenAiModel(base_url=server.url, api_key="sk-secret") as model:
        errors = [await fail(model) for _ in range(2)]
        assert server.connections == 1
    expected = "." if encoding == "none at all" else detail
    assert [(error.reason, error.message) for error in errors] == [
        ("HTTP_400", f"The model server refused the request (HTTP 400){expected}")
    ] * 2


@pytest.mark.parametrize("how", ["cut", "endless"])
async def test_a_refusal_without_its_end_is_a_refusal(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_ERROR_BYTES_MAX", 100_000)

    async def script(exchange: Exchange) -> None:
        await exchange.send("HTTP/1.1 503 No\r\nRetry-After: 7\r\nContent-Length: 99999999\r\n\r\n", b"x" * 10)
        if how == "cut":
            exchange.writer.close()
        else:
            await exchange.send(b"x" * 100_000)
            await exchange.client_left()

    async with model_http(script) as server, OpenAiModel(base_url=server.url, api_key="") as model:
        error = await fail(model)
    assert (error.reason, error.retry_after_seconds) == ("HTTP_503", 7.0)
