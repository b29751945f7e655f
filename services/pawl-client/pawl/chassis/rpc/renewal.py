"""A TLS channel that follows changes to its certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

import grpc

from pawl.chassis.process import logs, tasks
from pawl.chassis.rpc.tls import Certificates, Tls

_log = logs.get_logger(__name__)


class RenewedChannel(grpc.aio.Channel):
    """A channel that uses the current certificates.

    When certificates change, the next call opens a new channel. New calls move to it once it is connected, or once the
    old channel is disconnected. The old channel closes after its last call. A change therefore never makes a call fail.
    If the new certificates are rejected, calls continue on the old connection while it lasts.
    """

    def __init__(self, tls: Tls, open_one: Callable[[Certificates], grpc.aio.Channel]) -> None:
        self._tls = tls
        self._open_one = open_one
        self._present = _Line(tls(), open_one)
        self._next: _Line | None = None
        self._leaving: set[_Line] = set()
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        lines = {self._present, *self._leaving, *([self._next] if self._next else [])}
        self._leaving.clear()
        await asyncio.gather(*(line.channel.close(grace) for line in lines), *self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002
        return self._line().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._line().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._line().channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("stream_stream", args, kwargs)

    def _method(self, kind: str, args: Any, kwargs: Any) -> Any:
        made: tuple[_Line, Any] | None = None

        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            nonlocal made
            line = self._line()
            if made is None or made[0] is not line:
                made = line, getattr(line.channel, kind)(*args, **kwargs)
            call_started = made[1](*call_args, **call_kwargs)
            line.calls += 1
            call_started.add_done_callback(lambda _: self._end_call(line))
            return call_started

        return call

    def _line(self) -> _Line:
        certificates = self._tls()
        if certificates is not (self._next or self._present).certificates:
            if self._next is not None:
                self._leave(self._next)
            self._next = _Line(certificates, self._open_one)
        if self._next is not None:
            ready = grpc.ChannelConnectivity.READY
            is_connected = self._next.channel.get_state(try_to_connect=True) is ready
            if is_connected or self._present.channel.get_state() is not ready:
                left, self._present, self._next = self._present, self._next, None
                _log.info("tls.channel_renewed")
                self._leave(left)
        return self._present

    def _leave(self, line: _Line) -> None:
        self._leaving.add(line)
        self._end_if_idle(line)

    def _end_call(self, line: _Line) -> None:
        line.calls -= 1
        self._end_if_idle(line)

    def _end_if_idle(self, line: _Line) -> None:
        if line in self._leaving and not line.calls:
            self._leaving.discard(line)
            tasks.start(self._closing, line.channel.close(), name="channel.close")


class _Line:
    __slots__ = ("calls", "certificates", "channel")

    def __init__(self, certificates: Certificates, open_one: Callable[[Certificates], grpc.aio.Channel]) -> None:
        self.certificates = certificates
        self.channel = open_one(certificates)
        self.calls = 0
