"""Accepts users' messages. A message starts a run, is queued behind the active run, or steers it."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeAlias, TypeVar

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.agent_loop.agents.agents import Agents
from pawl.agent_loop.agents.rules import DEFAULT, AgentVersion, options_of
from pawl.agent_loop.api.ledger import PublicLedger, submission
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules import checks, parts
from pawl.agent_loop.loop.rules.options import AskedOptions, RunDefaults, complete
from pawl.agent_loop.loop.rules.parts import Part
from pawl.agent_loop.loop.rules.run import PinnedAgent
from pawl.agent_loop.loop.rules.tool import Tool
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import ClientId, RequestId
from pawl.chassis.labels import check_labels
from pawl.errors import AgentNotFound, DocumentNotFound, InvalidField, InvalidSchema, PawlError, TooLarge, ToolExists
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.tool.v1 import tool_pb2

T = TypeVar("T")
Start: TypeAlias = agent_pb2.StartRunRequest | session_pb2.Start
Message: TypeAlias = Start | agent_pb2.SendMessageRequest | session_pb2.UserMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTools:
    client_id: ClientId = ClientId("")
    definitions: tuple[bytes, ...] = ()


NO_SESSION: Final = SessionTools()


def definitions(tools: Iterable[tool_pb2.ToolDefinition]) -> tuple[bytes, ...]:
    """Serialize a run's tools.

    If there are too many, stop after the first one over the limit, which fails validation.
    """
    first = islice(tools, checks.OWN_TOOLS_MAX + 1)
    return tuple(each.SerializeToString(deterministic=True) for each in first)


async def unless_refused(
    message: pb.SubmitMessageRequest, refusal: PawlError | None, send: Callable[[], Awaitable[T]]
) -> T:
    """Send the message. If `refusal` is set, the ledger accepts the message only as a repeat of an earlier request.

    Only the ledger knows whether it already accepted the same request. It may have done so before an agent changed, for
    example, or before a document was deleted.
    """
    message.only_repeat = refusal is not None
    try:
        return await send()
    except ToolExists as error:
        raise refusal or error from None


class Messages:
    def __init__(
        self,
        *,
        ledger: PublicLedger,
        defaults: RunDefaults,
        agents: Agents,
        registry: RegistryClient,
        takes_images: bool,
    ) -> None:
        self._ledger = ledger
        self._takes_images = takes_images
        self._registry = registry
        self._defaults = defaults
        self._agents = agents

    async def start(
        self, caller: Principal, request_id: RequestId, message: Start, session: SessionTools = NO_SESSION
    ) -> run_pb2.Run:
        """Create a run and return once it is durable. Idempotent by request id.

        Raises:
            InvalidField, TooLarge: The message or an option is invalid, or conflicts with the agent.
            InvalidSchema: The schema of the response format or a supplied tool cannot be used.
            UnsupportedPart, DocumentNotFound: The model does not support a part, or a document does not exist.
            ToolExists: A supplied tool has the name of an existing tool.
            AgentNotFound, ConversationNotFound, ConversationBusy, QueueFull, RequestIdReused
        """
        if message.policy == types_pb2.MESSAGE_POLICY_STEER:
            raise InvalidField("policy STEER cannot start a run: use SendMessage", field="policy")
        checked, refusal = await self.checked(caller, request_id, message, must_exist=bool(message.conversation_id))
        if requested := _own_tools(message, session, without_tools=checked.options.without_tools):
            tools: tuple[Tool, ...] = ()
            try:
                tools = await self._registry.check_own(caller, requested)
            except (InvalidField, InvalidSchema, ToolExists) as error:
                refusal = refusal or error
            checked.tools.extend(map(wire.OWN_TOOL.write, tools))
            checked.client_id, checked.asked_tools_sha256 = session.client_id, _digest(requested)
        async with self._ledger.background_steps.foreground():
            return (await unless_refused(checked, refusal, lambda: self._ledger.submit_message(checked))).run

    async def send(
        self, caller: Principal, request_id: RequestId, message: agent_pb2.SendMessageRequest | session_pb2.UserMessage
    ) -> pb.SubmitMessageResponse:
        """Send a message to a conversation.

        Return its run, and whether the message entered a run that was already active.

        Raises:
            PawlError: Any error that `start` raises.
        """
        checked, refusal = await self.checked(caller, request_id, message, must_exist=True)
        async with self._ledger.background_steps.foreground():
            return await unless_refused(checked, refusal, lambda: self._ledger.submit_message(checked))

    async def checked(
        self, caller: Principal, request_id: RequestId, message: Message, *, must_exist: bool
    ) -> tuple[pb.SubmitMessageRequest, PawlError | None]:
        """Validate the message. Return the ledger's request and, if a new request must be refused, the reason.

        Raises:
            PawlError: Any error that `start` raises about the message itself.
        """
        text, content = self._content(message)
        labels = check_labels(message.labels)
        if message.policy not in types_pb2.MessagePolicy.values():
            raise InvalidField("policy has an unknown value", field="policy")
        requested = wire.asked_options(message.options)
        options = complete(requested, self._defaults)
        if requested.response_format is not None:
            await self._registry.check_output(caller.store_id, requested.response_format.schema_json, None)
        agent: AgentVersion | None = None
        refusal: PawlError | None = None
        try:
            agent = await self._agents.of_run(caller, message.agent)
            if agent is not None:
                options = complete(options_of(agent, requested, self._defaults.ceilings), self._defaults)
            content = await self._with_texts(caller, content)
        except (AgentNotFound, InvalidField, TooLarge, DocumentNotFound) as error:
            refusal = error
        checked = submission(
            caller,
            asked_options=requested,
            options=options,
            request_id=request_id,
            conversation_id=message.conversation_id,
            conversation_must_exist=must_exist,
            text=text,
            parts=map(wire.PART.fields, content),
            policy=message.policy or types_pb2.MESSAGE_POLICY_QUEUE,
            conversation_key=_key(message),
            asked_agent="" if message.agent == DEFAULT else message.agent,
            agent=wire.AGENT.fields(_pinned(agent, requested)) if agent else None,
            labels=labels,
        )
        return checked, refusal

    def _content(self, message: Message) -> tuple[str, tuple[Part, ...]]:
        if not message.parts:
            return checks.text(message.text, "text", bytes_max=checks.MESSAGE_BYTES_MAX), ()
        if message.policy == types_pb2.MESSAGE_POLICY_STEER:
            raise InvalidField("policy STEER accepts only text: send parts with QUEUE or INTERRUPT", field="policy")
        return "", parts.checked(
            message.text, tuple(map(wire.PART.read, message.parts)), takes_images=self._takes_images
        )

    async def _with_texts(self, caller: Principal, requested: Sequence[Part]) -> tuple[Part, ...]:
        found = [
            Part(file=parts.with_text(part.file, await self._registry.read_document(caller, part.file)))
            if part.file is not None
            else part
            for part in requested
        ]
        return parts.within(found)


def _own_tools(message: Start, session: SessionTools, *, without_tools: bool) -> Sequence[bytes]:
    if without_tools and message.front_end_tools:
        problem = "front_end_tools: leave it empty, because the run or its agent has without_tools set"
        raise InvalidField(problem, field="front_end_tools")
    requested = () if without_tools else (*definitions(message.front_end_tools), *session.definitions)
    return checks.own_tools(requested, "front_end_tools")


def _digest(definitions: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"".join(hashlib.sha256(each).digest() for each in definitions)).digest()


def _key(message: Message) -> str:
    """Return the validated conversation key of the message, which may be empty."""
    if not isinstance(message, Start):
        return ""
    if message.conversation_key and message.conversation_id:
        raise InvalidField("set conversation_id or conversation_key, not both", field="conversation_key")
    return checks.conversation_key(message.conversation_key)


def _pinned(agent: AgentVersion, requested: AskedOptions) -> PinnedAgent:
    gives_tools = bool(agent.tool_names) and not requested.tool_names
    return PinnedAgent(name=agent.run_name, version=agent.version, gives_tools=gives_tools)
