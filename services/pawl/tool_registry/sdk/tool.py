"""The decorator that makes a tool of a function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, ParamSpec, TypeVar, overload

import msgspec
import pydantic

from pawl.chassis import job_reports
from pawl.errors import PawlError
from pawl.tool_registry.rules.definition import (
    ASYNC_TIMEOUT_SECONDS_MAX,
    TIMEOUT_SECONDS_MIN,
    ToolDefinition,
    check_definition,
)
from pawl.tool_registry.rules.schema import compile_schema
from pawl.tool_registry.sdk.context import ToolContext, ToolError
from pawl.tool_registry.sdk.process import ProcessLimits, check_process
from pawl.tool_registry.sdk.reconciling import ReconcileResult
from pawl.tool_registry.sdk.signature import Signature, ToolDefinitionError, read_signature
from pawl.values import Category, EffectClass, ExecutionContext

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Reconcile = Callable[[ToolContext], Awaitable[ReconcileResult]]
Preview = Callable[..., str]
BulkCount = Callable[..., int]

_NAMED: Final = {"$.category": Category, "$.effect": EffectClass}


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeArguments:
    """The arguments as they are, in one parameter `arguments`, and the context in `context`."""

    context_parameter: str = "context"

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the one parameter."""
        return {"arguments": dict(arguments)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool(Generic[P, R]):
    """A function with its definition. Calling it calls the function, for tests and for other tools."""

    function: Callable[P, R]
    definition: ToolDefinition
    signature: Signature | WholeArguments
    reconcile: Reconcile | None
    _preview: Preview | None
    _bulk_count: BulkCount | None
    process: ProcessLimits | None = None
    """The limits of each call in a process of its own; None if it runs in the registry's."""
    heartbeat_seconds: float = 0.0
    """An execution that says nothing for so long counts as lost; 0 means that it may be silent."""
    marks_begun: bool = False
    """True if the function itself says, by `ToolContext.mark_begun`, when a call may have its effect."""
    is_remote: bool = False
    """True if a call that is cancelled goes on or not out of sight: its server is only told."""
    runs_apart: bool = False
    """True if its async code runs on the event loop of tools, apart from the registry's."""
    goes_out: bool = False
    """True if a call is seen beyond the registry: by a source, a worker, or a server that it asks by the egress."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @property
    def name(self) -> str:
        """The name that the model calls it by."""
        return self.definition.name

    @property
    def is_async(self) -> bool:
        """True if the function is a coroutine function."""
        return inspect.iscoroutinefunction(self.function)

    @property
    def is_stoppable(self) -> bool:
        """True if a call ends soon when it is cancelled; a thread may go on for as long as it likes."""
        return self.is_async or self.process is not None

    def bind(self, arguments: Mapping[str, Any], context: ToolContext) -> Callable[[], R]:
        """Return the call with arguments that fit the schema, to be made where it belongs.

        Raises:
            ToolError: a type asks for more than its schema says.
        """
        try:
            parameters = self.signature.bind(arguments)
        except (msgspec.ValidationError, pydantic.ValidationError) as error:
            raise ToolError(f"the arguments of {self.name} do not fit: {error}") from None
        if self.signature.context_parameter:
            parameters[self.signature.context_parameter] = context
        function: Callable[..., R] = self.function
        return lambda: function(**parameters)

    def preview(self, arguments: Mapping[str, Any]) -> Callable[[], str] | None:
        """Return what says what a call would do, in the tool's words; None if it has no preview."""
        return _bound(self._preview, self.signature, arguments)

    def bulk_count(self, arguments: Mapping[str, Any]) -> Callable[[], int] | None:
        """Return what counts the things a call is about; None if the tool has no count of its own."""
        return _bound(self._bulk_count, self.signature, arguments)


def _bound(
    function: Callable[..., T] | None, signature: Signature | WholeArguments, arguments: Mapping[str, Any]
) -> Callable[[], T] | None:
    return None if function is None else lambda: function(**signature.bind(arguments))


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *,
    name: str = ...,
    description: str = ...,
    category: Category = ...,
    effect: EffectClass = ...,
    context: ExecutionContext = ...,
    timeout_seconds: float = ...,
    parallel: bool = ...,
    resource_keys: Sequence[str] = ...,
    result_bytes_max: int = ...,
    allowed_users: Sequence[str] = ...,
    allowed_roles: Sequence[str] = ...,
    rate_per_minute: int = ...,
    cache_seconds: float = ...,
    approvals_required: int = ...,
    background: bool = ...,
    async_timeout_seconds: float = ...,
    heartbeat_seconds: float = ...,
    grants: bool = ...,
    reports: str | Mapping[str, float] = ...,
    preview: Preview | None = ...,
    bulk_count: BulkCount | None = ...,
    reconcile: Reconcile | None = ...,
    process: ProcessLimits | None = ...,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str = "",
    description: str = "",
    category: Category = Category.SENSITIVE,
    effect: EffectClass = EffectClass.AT_MOST_ONCE,
    context: ExecutionContext = ExecutionContext.BACKEND,
    timeout_seconds: float = 0.0,
    parallel: bool = False,
    resource_keys: Sequence[str] = (),
    result_bytes_max: int = 0,
    allowed_users: Sequence[str] = (),
    allowed_roles: Sequence[str] = (),
    rate_per_minute: int = 0,
    cache_seconds: float = 0.0,
    approvals_required: int = 0,
    background: bool = True,
    async_timeout_seconds: float = 0.0,
    heartbeat_seconds: float = 0.0,
    grants: bool = False,
    reports: str | Mapping[str, float] = "",
    preview: Preview | None = None,
    bulk_count: BulkCount | None = None,
    reconcile: Reconcile | None = None,
    process: ProcessLimits | None = None,
) -> Tool[P, R] | Callable[[Callable[P, R]], Tool[P, R]]:
    """Make a tool of a sync or async function. docs/guides/tools.md lists the options; defaults are the cautious ones.

    Raises:
        ToolDefinitionError: the function or an option cannot be used.
    """

    def make(function: Callable[P, R]) -> Tool[P, R]:
        signature = read_signature(function)
        made = Tool(
            function=function,
            definition=_define(
                name=name or getattr(function, "__name__", ""),
                description=description or signature.description,
                arguments_schema=signature.arguments_schema,
                context=context,
                category=category,
                effect=effect,
                timeout_seconds=float(timeout_seconds),
                parallel=parallel,
                resource_keys=resource_keys,
                result_bytes_max=result_bytes_max,
                allowed_user_ids=allowed_users,
                allowed_roles=allowed_roles,
                rate_per_minute=rate_per_minute,
                cache_seconds=float(cache_seconds),
                approvals_required=approvals_required,
                without_background=not background,
                async_timeout_seconds=float(async_timeout_seconds),
                permits_grants=grants,
                reports=reports,
            ),
            signature=signature,
            reconcile=reconcile,
            _preview=preview,
            _bulk_count=bulk_count,
            process=process,
            heartbeat_seconds=float(heartbeat_seconds),
        )
        return _checked(made)

    return make if function is None else make(function)


def _define(**fields: Any) -> ToolDefinition:
    """Return the definition of fields as their author wrote them.

    Raises:
        ToolDefinitionError: there is no description, or a field is not of its type, which no checker of types has said.
    """
    if not fields["description"]:
        raise ToolDefinitionError(f"{fields['name']}: description: there is none; write a docstring for the model")
    try:
        fields["reports"] = job_reports.read(fields["reports"]) if fields["reports"] else None
        return msgspec.convert(fields, ToolDefinition)
    except PawlError as error:
        raise ToolDefinitionError(f"{fields['name']}: {error.message}") from None
    except msgspec.ValidationError as error:
        known = next((kind for path, kind in _NAMED.items() if path in str(error)), ())
        hint = f"; it may be {', '.join(known)}" if known else ""
        raise ToolDefinitionError(f"{fields['name']}: {error}{hint}") from None


def _checked(made: Tool[P, R]) -> Tool[P, R]:
    """Return a tool of which all that was said holds together.

    Raises:
        ToolDefinitionError: it does not.
    """
    definition = made.definition
    if (made.reconcile is not None) != (definition.effect is EffectClass.RECONCILABLE):
        raise ToolDefinitionError(f"{made.name}: reconcile goes with the effect RECONCILABLE, and only there")
    if made.heartbeat_seconds and not TIMEOUT_SECONDS_MIN <= made.heartbeat_seconds <= ASYNC_TIMEOUT_SECONDS_MAX:
        limits = f"{TIMEOUT_SECONDS_MIN} to {ASYNC_TIMEOUT_SECONDS_MAX:g}"
        raise ToolDefinitionError(f"{made.name}: heartbeat_seconds: must be {limits}")
    if made.heartbeat_seconds and definition.context is not ExecutionContext.BACKEND:
        raise ToolDefinitionError(f"{made.name}: heartbeat_seconds goes with tools that the registry runs")
    if made.process is not None:
        check_process(made.name, made.function, definition.context, made.process)
    try:
        check_definition(definition)
        compile_schema(definition.arguments_schema, recursion=True)
    except PawlError as error:
        raise ToolDefinitionError(f"{made.name}: {error.message}") from None
    return made


def forwarded(
    definition: ToolDefinition,
    forward: Callable[..., Awaitable[Any]],
    *,
    reconcile: Reconcile | None = None,
    preview: Callable[[dict[str, Any]], str] | None = None,
    marks_begun: bool = False,
    is_remote: bool = False,
) -> Tool[..., Any]:
    """Return a tool that hands its calls on: to a worker, an MCP server, an HTTP endpoint.

    `forward` is a coroutine function of `arguments`, as they are, and `context`. Everything that holds for a Python
    tool holds for it: checks, journal, timeout, cancellation, progress, secrets.
    """
    return Tool(
        function=forward,
        definition=definition,
        signature=WholeArguments(),
        reconcile=reconcile,
        _preview=preview,
        _bulk_count=None,
        marks_begun=marks_begun,
        is_remote=is_remote,
        goes_out=True,
    )
