"""The tool that reads web pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Final

import msgspec

from pawl.chassis.ids import StoreId
from pawl.server.egress.client import Egress, OutboundRequest, OutboundResponse, RequestFailed
from pawl.server.egress.policy import URL_CHARACTERS_MAX, EgressRefused
from pawl.tool_registry.builtin.web.text import NotText, read_page
from pawl.tool_registry.catalog.ports import Helper, TooCostly
from pawl.tools.sdk.context import ToolContext, ToolError
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass

PAGE_BYTES_MAX: Final = 2 * 1024 * 1024
CHARACTERS_MAX: Final = 40_000
FETCH_SECONDS: Final = 20.0
READ_CPU_SECONDS: Final = 6.0

_CHARACTERS_DEFAULT: Final = 10_000
_OK: Final = range(200, 300)
_ACCEPT: Final = "text/html, application/xhtml+xml, text/*;q=0.9, application/json;q=0.9, application/xml;q=0.8"


def web_tools(egress: Egress, helper: Helper) -> list[Tool[..., Any]]:
    # SAFE even though a URL can leak data, because requiring approval for each page would make the tool useless. A
    # deployment can restrict the allowed hosts.
    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, timeout_seconds=30)
    async def web_scrape(
        context: ToolContext,
        url: Annotated[
            str,
            msgspec.Meta(min_length=1, max_length=URL_CHARACTERS_MAX, extra_json_schema={"format": "url"}),
            "http or https",
        ],
        offset: Annotated[int, msgspec.Meta(ge=0), "characters to skip; next_offset of the previous call"] = 0,
        max_characters: Annotated[
            int, msgspec.Meta(ge=1, le=CHARACTERS_MAX), "characters to read"
        ] = _CHARACTERS_DEFAULT,
        *,
        links: Annotated[bool, "whether to list the links of the page"] = False,
    ) -> dict[str, Any]:
        """Fetch a web page and return its readable text."""
        response = await _fetch(egress, StoreId(context.store_id), url)
        try:
            page = await helper.run(
                StoreId(context.store_id),
                read_page,
                response.body,
                response.content_type,
                response.url,
                cpu_seconds=READ_CPU_SECONDS,
            )
        except TooCostly:
            raise ToolError(f"{response.url} takes too long to read") from None
        except NotText as error:
            raise ToolError(f"{response.url} cannot be read: {error}") from None
        end = offset + max_characters
        found: dict[str, Any] = {
            "url": response.url,
            "title": page.title,
            "text": page.text[offset:end],
            "offset": offset,
            "total_characters": len(page.text),
            "next_offset": end if end < len(page.text) else None,
        }
        if response.is_cut:
            found["note"] = f"only the first {PAGE_BYTES_MAX} bytes of the page were read"
        if links:
            found["links"] = [{"text": text, "url": target} for text, target in page.links]
        return found

    return [replace(web_scrape, is_external=True)]


async def _fetch(egress: Egress, store_id: StoreId, url: str) -> OutboundResponse:
    request = OutboundRequest(
        url=url.strip(), headers={"Accept": _ACCEPT}, timeout_seconds=FETCH_SECONDS, bytes_max=PAGE_BYTES_MAX
    )
    try:
        response = await egress.send(store_id, request)
    except (EgressRefused, RequestFailed) as error:
        raise ToolError(str(error)) from None
    if response.status not in _OK:
        raise ToolError(f"{response.url} answered with status {response.status}")
    return response
