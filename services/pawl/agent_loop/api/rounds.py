"""Returns the request and answer of one of a run's model calls. The request is rebuilt from the run's history."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final, NamedTuple

from msgspec.structs import replace

from pawl.agent.v1.steps_pb2 import GetRoundRequest, GetRoundResponse
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.loop.ledger import load_at
from pawl.agent_loop.loop.ports import CallContext
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules.loop_state import LoopState, OpenModelCall
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.loop.rules.tool import Tool
from pawl.agent_loop.loop.run_tools import pinned_tools
from pawl.agent_loop.model.names import names_of, renamed
from pawl.agent_loop.model.request import ModelRequest
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RunId, RunKey
from pawl.chassis.rpc.parts import in_parts
from pawl.errors import InvalidField, RoundNotFound
from pawl.event.v1.call_pb2 import Call
from pawl.event.v1.event_pb2 import RunEvent
from pawl.event.v1.message_pb2 import ROLE_ASSISTANT

# Together they fit into a response that clients accept.
_REQUEST_BYTES_MAX: Final = 3 * 1024 * 1024
_CALLS_BYTES_MAX: Final = 256 * 1024


class Rebuilding(NamedTuple):
    """Functions that build a request and its body as workers do, with the deployment's settings."""

    request_of: Callable[[State, Sequence[Tool]], ModelRequest]
    body_of: Callable[[ModelRequest], bytes]


class _Round:
    """The data about round `number` in a run's log."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.response = GetRoundResponse()
        self.is_found = False
        self.without_tools = False
        # None until the model call has ended.
        self.output_tokens_max: int | None = None
        # Number of the last message before the model call.
        self.last_number = 0

    def take(self, event: RunEvent) -> bool:
        """Apply the next event. Return whether the round is complete."""
        response = self.response
        match event.WhichOneof("kind"):
            case "message_added" if not self.is_found:
                self.last_number = event.message_added.message.number
            case "message_added" if event.message_added.message.role == ROLE_ASSISTANT:
                response.message.CopyFrom(event.message_added.message)
                return True
            case "round_started" if self.is_found:
                return True
            case "round_started" if event.round_started.round == self.number and not event.round_started.summary:
                self.is_found, self.without_tools = True, event.round_started.without_tools
                response.model = event.round_started.model
                response.start_time.CopyFrom(event.time)
            case "round_retrying" if self.is_found:
                response.model = event.round_retrying.model
            case "round_ended" if self.is_found:
                ended = event.round_ended
                response.sent_sha256, response.finish_reason = ended.request_sha256, ended.finish_reason
                response.usage.CopyFrom(ended.usage)
                response.end_time.CopyFrom(event.time)
                self.output_tokens_max = ended.output_tokens_max
            case _:
                pass
        return False


class Rounds:
    """Reads the model calls of runs. Stateless."""

    def __init__(self, ledger: PublicLedger, registry: RegistryClient, rebuilding: Rebuilding) -> None:
        self._ledger = ledger
        self._registry = registry
        self._rebuilding = rebuilding

    async def get(self, caller: Principal, request: GetRoundRequest) -> GetRoundResponse:
        """Return a round of one of the user's runs.

        Raises:
            InvalidId, InvalidField, RunNotFound, RoundNotFound
            ToolNotFound: The user can no longer use a tool that the request offered.
        """
        run_id = convert.run_id(request)
        if not request.round:
            raise InvalidField("round must be at least 1, got 0", field="round")
        found = await self._read(caller, run_id, request.round)
        loaded, calls = await load_at(self._ledger.channel, RunKey(caller.store_id, run_id), found.last_number)
        state = _as_then(loaded.state, found)
        resolve = partial(self._registry.resolve, CallContext.of(state.run))
        body = self._body(state, await pinned_tools(state.run, loaded.own_tools, resolve), found)
        response = found.response
        response.matches = hashlib.sha256(body).hexdigest() == response.sent_sha256
        if len(body) <= _REQUEST_BYTES_MAX:
            response.request_json = body
        else:
            response.request_omitted_bytes = len(body)
        own = [_without_result(call) for call in calls if call.call_id in response.message.call_ids]
        response.calls.extend(next(in_parts(own, Call.ByteSize, size_max=_CALLS_BYTES_MAX), []))
        return response

    def _body(self, state: State, tools: Sequence[Tool], found: _Round) -> bytes:
        request = self._rebuilding.request_of(state, tools)
        most = found.output_tokens_max
        most = state.run.options.output_tokens_max if most is None else most or None
        return self._rebuilding.body_of(replace(renamed(request, names_of(request)), output_tokens_max=most))

    async def _read(self, caller: Principal, run_id: RunId, number: int) -> _Round:
        found = _Round(number)
        async with aclosing(self._events(caller, run_id)) as events:
            async for event in events:
                if found.take(event):
                    break
        if not found.is_found:
            raise RoundNotFound(f"run {run_id} has no model call in round {number}")
        return found

    async def _events(self, caller: Principal, run_id: RunId) -> AsyncGenerator[RunEvent, None]:
        after_seq = 0
        while True:
            page = await self._ledger.list_events(caller, run_id, after_seq)
            if page.HasField("gap"):
                raise RoundNotFound(f"the events of run {run_id} up to seq {page.gap.to_seq} were deleted")
            for event in page.events:
                yield RunEvent.FromString(event)
            after_seq += len(page.events)
            if not page.events or after_seq >= page.last_seq:
                return


def _as_then(state: State, found: _Round) -> State:
    """Return the run's state at the time of the model call."""
    options = state.run.options
    models = (options.model, *options.model_fallbacks)
    fallbacks_used = models.index(found.response.model) if found.response.model in models else 0
    opened = OpenModelCall(attempt=1, without_tools=found.without_tools)
    loop = LoopState(model_call=opened, fallbacks_used=fallbacks_used)
    return replace(state, run=replace(state.run, round=found.number), loop=loop)


def _without_result(call: Call) -> Call:
    if call.HasField("result"):
        call.result_omitted_bytes = len(call.result.content_json)
        call.ClearField("result")
    return call
