"""Builds the gateway's ASGI application from channels."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import grpc
from starlette.types import ASGIApp

from pawl.chassis.ids import IdSource, is_id
from pawl.chassis.process.clock import Clock
from pawl.chassis.process.start import StartError
from pawl.gateway.app import application
from pawl.gateway.login.callers import Callers
from pawl.gateway.login.http import OpenIdLogins
from pawl.gateway.login.providers import Providers
from pawl.gateway.login.rules import Provider, parse_providers
from pawl.gateway.login.session import Seal
from pawl.gateway.metrics import Counters
from pawl.gateway.services import Metadata, Services, calls_of_store
from pawl.gateway.settings import GatewaySettings
from pawl.gateway.web.streams import Streams
from pawl.server.identity.credentials import service_key
from pawl.server.process.http_server import Page
from pawl.server.process.metrics import Metrics


def wire(
    settings: GatewaySettings,
    channels: Mapping[str, grpc.aio.Channel],
    *,
    closing: asyncio.Event,
    health: Page,
    metrics: Metrics,
    clock: Clock,
    ids: IdSource,
) -> ASGIApp:
    services, counters = Services(channels, service_key(settings, clock)), Counters(metrics)
    seal = Seal(settings.gateway_seal_key.get_secret_value())
    session_seconds = settings.gateway_session_hours * 3600
    problems_file = settings.data / "run" / "problems.json"
    callers = Callers(seal, services, clock, session_seconds=session_seconds, problems_file=problems_file)
    logins = OpenIdLogins(
        _providers(settings),
        providers=Providers(clock),
        callers=callers,
        seal=seal,
        clock=clock,
        session_seconds=session_seconds,
        public_url=settings.public_url,
    )
    return application(
        callers=callers,
        logins=logins,
        services=services,
        streams=Streams(callers, services, counters, closing, streams_max=settings.streams_max),
        calls_of_store=partial(calls_of_store, services, _keys(settings)),
        counters=counters,
        ids=ids,
        hosts=settings.hosts,
        origins=settings.origins,
        health=health,
        bytes_max=settings.message_bytes_max,
    )


def _keys(settings: GatewaySettings) -> Callable[[str], Metadata | None]:
    if settings.local_key is not None:
        local = settings.local_key.get_secret_value()
        return lambda store_id: (("authorization", f"Bearer {local}"), ("pawl-store", store_id))
    keys = _read(settings.gateway_webhook_keys_file) if settings.gateway_webhook_keys_file else {}
    by_store = {store_id: (("authorization", f"Bearer {key}"),) for store_id, key in keys.items()}
    return by_store.get


def _providers(settings: GatewaySettings) -> tuple[Provider, ...]:
    path = settings.gateway_oidc_file
    try:
        return parse_providers(path.read_bytes()) if path else ()
    except (OSError, ValueError) as error:
        raise StartError(f"PAWL_GATEWAY_OIDC_FILE: cannot use {path}: {error}") from None


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartError(f"PAWL_GATEWAY_WEBHOOK_KEYS_FILE: cannot read {path}: {error}") from None
    if not isinstance(found, dict) or not all(is_id(name) and isinstance(key, str) for name, key in found.items()):
        raise StartError(
            f'PAWL_GATEWAY_WEBHOOK_KEYS_FILE: {path} must be {{"store": "key"}}, with keys that have the gateway role'
        )
    return found
