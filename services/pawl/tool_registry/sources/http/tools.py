"""The tools of HTTP services: an OpenAPI document's operations, or one endpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from pawl.chassis.ids import StoreId
from pawl.chassis.rpc.trace_context import TRACEPARENT_KEY
from pawl.chassis.strict_json import loads
from pawl.errors import InvalidField, InvalidJson, SourceUnreachable, TooLarge
from pawl.server.egress.client import Egress, OutboundRequest, OutboundResponse, RequestFailed
from pawl.server.egress.policy import EgressRefused, read_target
from pawl.tool.v1.source_pb2 import OpenApiConfig, SourceConfig
from pawl.tool_registry.catalog.ports import Helper, TooCostly
from pawl.tool_registry.sources.http.config import check_base_url, check_config, endpoint_tool
from pawl.tool_registry.sources.http.openapi_extract import extract, read_tools
from pawl.tool_registry.sources.http.rules.binding import (
    Binding,
    BuiltRequest,
    UnusableArgument,
    build,
    may_be_header_value,
)
from pawl.tool_registry.sources.http.rules.openapi_document import DOCUMENT_BYTES_MAX, KEPT_BYTES_MAX, UnusableDocument
from pawl.tool_registry.sources.rules import Discovery
from pawl.tool_registry.sources.source import Source
from pawl.tools.rules.definition import (
    ASYNC_TIMEOUT_SECONDS_MAX,
    RESULT_BYTES_MAX,
    ToolDefinition,
    ToolVersion,
    require,
)
from pawl.tools.sdk.context import OutcomeUnknown, ResultTooLarge, ToolContext, ToolError
from pawl.tools.sdk.tool import Tool, forwarded

T = TypeVar("T")

KIND: Final = "http"
DOCUMENT_SECONDS: Final = 20.0
DOCUMENT_CPU_SECONDS: Final = 30.0

_ERROR_CHARACTERS_MAX: Final = 2000
_OK: Final = range(200, 300)
_ACCEPT: Final = "application/json, text/*;q=0.8, */*;q=0.1"


class HttpTools:
    """The Connector for sources of kind `http`.

    A tool's binding contains its whole request, so there is no state between calls. The binding also determines the
    destination of secrets, so an approval of a tool includes that destination.
    """

    def __init__(self, egress: Egress, helper: Helper) -> None:
        self._egress = egress
        self._helper = helper

    async def prepared(self, source: Source) -> Source:
        """Return the source in its stored form, with an oversized document reduced to its chosen operations."""
        check_config(source.config)
        document = source.config.open_api
        if len(document.document) <= KEPT_BYTES_MAX:
            return source
        config = SourceConfig()
        config.CopyFrom(source.config)
        config.open_api.document = await self._in_helper(
            source, extract, document.document, list(document.operation_ids)
        )
        return replace(source, config=config)

    async def discover(self, source: Source) -> Discovery:
        check_config(source.config)
        if source.config.HasField("open_api"):
            found = await self._read_document(source, source.config.open_api)
        else:
            found = Discovery(tools=[endpoint_tool(source.name, source.config.http_endpoint)])
        for tool in found.tools:
            binding = msgspec.json.decode(tool.binding, type=Binding)
            try:
                start = binding.url.partition("?")[0].partition("{")[0]
                self._egress.check(source.store_id, start, with_secrets=bool(binding.secret_headers))
            except EgressRefused as refused:
                raise InvalidField(f"config: {refused}", field="config") from None
        return found

    async def _read_document(self, source: Source, config: OpenApiConfig) -> Discovery:
        if config.base_url:
            check_base_url("open_api.base_url", config.base_url)
        read = config
        if config.document_url:
            read = OpenApiConfig()
            read.CopyFrom(config)
            read.document, read.document_url = await self._fetch(source.store_id, config.document_url)
        found = await self._in_helper(source, read_tools, read.document, source.name, read)
        for operation in found.left_out:
            if operation.name in config.operation_ids or not found.tools:
                text = f"open_api.operation_ids: {operation.name!r} cannot become a tool: {operation.reason}"
                raise InvalidField(text, field="open_api.operation_ids")
        for tool in found.tools:
            url = msgspec.json.decode(tool.binding, type=Binding).url.partition("?")[0].partition("{")[0]
            check_base_url("open_api.base_url", url)
            if config.secret_headers and config.document_url and not config.base_url:
                _check_origin(url, config.document_url)
        return found

    async def _in_helper(self, source: Source, function: Callable[..., T], data: bytes, *more: Any) -> T:
        try:
            return await self._helper.run(source.store_id, function, data, *more, cpu_seconds=DOCUMENT_CPU_SECONDS)
        except TooCostly:
            problem = "it takes too long to read; JSON is faster to read than YAML"
        except UnusableDocument as error:
            problem = str(error)
        raise InvalidField(f"open_api.document: {problem}", field="open_api.document")

    async def _fetch(self, store_id: StoreId, url: str) -> tuple[bytes, str]:
        """Return a document and its final URL. The source's headers are not sent."""
        request = OutboundRequest(url=url, timeout_seconds=DOCUMENT_SECONDS, bytes_max=DOCUMENT_BYTES_MAX)
        try:
            response = await self._egress.send(store_id, request)
        except EgressRefused as refused:
            raise InvalidField(f"open_api.document_url: {refused}", field="open_api.document_url") from None
        except RequestFailed as failed:
            raise SourceUnreachable(f"open_api.document_url: {failed}") from None
        if response.status not in _OK:
            raise SourceUnreachable(f"open_api.document_url: answered with status {response.status}")
        over = f"the document is larger than the limit of {DOCUMENT_BYTES_MAX} bytes"
        require(not response.is_cut, "open_api.document_url", over)
        return response.body, response.url

    def tool(self, entry: ToolVersion) -> Tool[..., Any] | None:
        binding = msgspec.json.decode(entry.binding, type=Binding)
        call = partial(self._call, entry.definition, binding)
        return forwarded(entry.definition, call, preview=partial(_preview, binding), is_remote=True)

    async def forget(self, store_id: StoreId, name: str) -> None:
        """Do nothing, because this connector holds no connections."""

    async def _call(
        self, definition: ToolDefinition, binding: Binding, arguments: dict[str, Any], context: ToolContext
    ) -> Any:
        try:
            built = build(binding, arguments)
        except UnusableArgument as error:
            raise ToolError(str(error)) from None
        request = OutboundRequest(
            url=built.url,
            method=binding.method,
            headers=_headers(binding, built, context),
            body=built.body,
            # The call has its own timeout. The timeout of the request must not be shorter.
            timeout_seconds=ASYNC_TIMEOUT_SECONDS_MAX,
            bytes_max=RESULT_BYTES_MAX,
        )
        try:
            response = await self._egress.send(StoreId(context.store_id), request)
        except EgressRefused as refused:
            raise ToolError(str(refused)) from None
        except RequestFailed as failed:
            if failed.was_sent and definition.effect.is_journaled:
                raise OutcomeUnknown(str(failed)) from None
            raise ToolError(str(failed)) from None
        return _result(response)


def _check_origin(url: str, document_url: str) -> None:
    """Check that all servers in a fetched document have the same origin as the document.

    The store's admin provided only the document's URL, so the document's author must not determine where secrets are
    sent.
    """
    server, asked = read_target(url), read_target(document_url)
    require(
        server.origin == asked.origin,
        "open_api.base_url",
        f"must be set to send secrets to {server.origin}, because only the document lists that server",
    )


def _headers(binding: Binding, built: BuiltRequest, context: ToolContext) -> dict[str, str]:
    trace = {TRACEPARENT_KEY: context.traceparent} if context.traceparent else {}
    headers = {"Accept": _ACCEPT} | trace | built.headers
    for name, secret in binding.secret_headers.items():
        value = context.secret(secret)
        if not may_be_header_value(value):
            raise ToolError(f"the secret {secret!r} contains characters that are not allowed in a header")
        headers[name] = value
    if binding.idempotency_header:
        # Two stores may use the same service, and their calls may have the same id.
        key = f"{context.store_id}\0{context.idempotency_key}"
        headers[binding.idempotency_header] = hashlib.sha256(key.encode()).hexdigest()[:32]
    return headers


def _result(response: OutboundResponse) -> Any:
    text = response.body.decode(errors="replace").replace("\0", "")
    if response.status not in _OK:
        detail = f": {text[:_ERROR_CHARACTERS_MAX]}" if text.strip() else ""
        raise ToolError(f"the service answered with status {response.status}{detail}")
    if response.is_cut:
        raise ResultTooLarge(
            f"the service answered with status {response.status} and more than {RESULT_BYTES_MAX} bytes; "
            "the request took effect, but its result cannot be read"
        )
    kind = response.content_type.partition(";")[0].strip().lower()
    if not response.body:
        return {"status": response.status}
    if not kind or kind.endswith(("/json", "+json")):
        try:
            return loads(response.body, bytes_max=RESULT_BYTES_MAX)
        except (InvalidJson, TooLarge):
            return text
    if kind.startswith("text/") or kind.endswith(("/xml", "+xml", "/yaml", "/javascript")):
        return text
    return {"status": response.status, "content_type": kind, "bytes": len(response.body)}


def _preview(binding: Binding, arguments: dict[str, Any]) -> str:
    built = build(binding, arguments)
    body = "" if built.body is None else f"\n\n{built.body.decode()}"
    return f"{binding.method} {built.url}{body}"
