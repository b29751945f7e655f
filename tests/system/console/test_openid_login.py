"""Logins in a browser with a real identity provider."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from joserfc import jwk
from playwright.async_api import Browser, Page, expect

from pawl.launcher.options import SuiteOptions
from pawl.launcher.ports import free_port
from pawl.launcher.suite import Suite
from tests.poll import until
from tests.servers import install_provider, open_folder, provider
from tests.system.console.conftest import PATIENCE_MS, address, click, say

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]

TOKEN_SECONDS = 8
RENEW = "/login/renew"
WHO_AM_I = "/rpc/pawl.agent.v1.AgentService/WhoAmI"


@dataclass(frozen=True)
class World:
    suite: Suite
    issuer: str

    @property
    def url(self) -> str:
        return address(self.suite)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    modules = install_provider(tmp_path_factory.mktemp("npm"))
    issuer = f"http://127.0.0.1:{free_port()}"
    port = free_port()
    with open_folder() as folder:
        tokens, logins = folder / "oidc.json", folder / "logins.json"
        roles = {"claim": "groups", "map": {"leads": ["approver", "member"]}}
        rules = {"audience": "pawl", "store": {"claim": "tenant"}, "user": {"claim": "sub"}, "roles": roles}
        tokens.write_text(json.dumps([{"issuer": issuer, "leeway_seconds": 0, **rules}]))
        known = {"client_id": "pawl", "client_secret": "secret-of-the-gateway-of-the-tests"}
        more = {"scope": "openid offline_access", "parameters": {"prompt": "consent"}}
        logins.write_text(
            json.dumps([{"name": "house", "title": "Log in at the house", "issuer": issuer, **known, **more}])
        )
        client = {
            **known,
            "redirect_uris": [f"http://127.0.0.1:{port}/login/return/house"],
            "grant_types": ["authorization_code", "refresh_token"],
            "id_token_signed_response_alg": "ES256",
        }
        options = SuiteOptions(
            data=folder / "data",
            ports={"gateway": port},
            environment={"PAWL_OIDC_FILE": str(tokens), "PAWL_GATEWAY_OIDC_FILE": str(logins)},
        )
        key = jwk.generate_key("EC", "P-256", {"kid": "one"})
        async with provider(modules, issuer, [client], key, token_seconds=TOKEN_SECONDS), Suite(options) as suite:
            yield World(suite, issuer)


async def log_in(page: Page, path: str = "/") -> None:
    await page.goto(path)
    await page.get_by_role("link", name="Log in at the house").click()
    await page.get_by_placeholder("Enter any login").fill("ann")
    await page.get_by_placeholder("and password").fill("any")
    await click(page, "Sign-in", "Continue")


async def test_user_stays_logged_in_while_tokens_are_renewed(browser: Browser, world: World) -> None:
    context = await browser.new_context(base_url=world.url)
    context.set_default_timeout(PATIENCE_MS)
    page = await context.new_page()
    renewals: list[str] = []
    page.on(
        "response", lambda answer: renewals.append(answer.url) if answer.url.endswith(RENEW) and answer.ok else None
    )
    await log_in(page, "/runs?view=failed")
    await expect(page.get_by_role("heading", name="Runs")).to_be_visible()
    assert page.url == f"{world.url}/runs?view=failed"

    port = urlsplit(world.url).port
    cookies = {cookie["name"].removesuffix(f"_{port}"): cookie for cookie in await context.cookies()}
    assert all(cookie["httpOnly"] for cookie in cookies.values())
    assert cookies["pawl_session"]["sameSite"] == cookies["pawl_renewal"]["sameSite"] == "Strict"
    assert cookies["pawl_renewal"]["path"] == "/login"
    assert "pawl_login" not in cookies

    async def is_over() -> bool:
        return (await page.request.post(WHO_AM_I, data={}, headers={"origin": world.url})).status == 401

    for _ in range(2):
        seen = len(renewals)
        await until(is_over)
        await page.goto("/")
        await expect(page.get_by_label("Your message")).to_be_visible()
        assert len(renewals) > seen
    await say(page, "what is 6 * 7")
    await expect(page.locator(".turn")).to_contain_text("42")

    await page.get_by_role("button", name="Log out").click()
    await expect(page.get_by_label("Your key")).to_be_visible()
    assert not any(cookie["name"].startswith("pawl") for cookie in await context.cookies())
    assert (await page.request.post(RENEW, data={}, headers={"origin": world.url})).status == 401
    await context.close()
