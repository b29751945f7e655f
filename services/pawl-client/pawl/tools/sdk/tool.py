"""The `tool` decorator, which turns a function into a tool."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, ParamSpec, TypeVar, overload

import msgspec
import pydantic

from pawl.chassis import job_reports
from pawl.errors import PawlError
from pawl.tools.rules.definition import (
    ASYNC_TIMEOUT_SECONDS_MAX,
    TIMEOUT_SECONDS_MIN,
    ToolDefinition,
    check_definition,
)
from pawl.tools.rules.schema import compile_schema
from pawl.tools.sdk.context import ToolContext, ToolError
from pawl.tools.sdk.process import ProcessLimits, check_process
from pawl.tools.sdk.reconciling import ReconcileResult
from pawl.tools.sdk.signature import Signature, ToolDefinitionError, read_signature
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
    """Passes all arguments unchanged as the parameter `arguments`, and the context as `context`."""

    context_parameter: str = "context"

    def bind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {"arguments": dict(arguments)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool(Generic[P, R]):
    """A function with its tool definition. Calling the tool calls the function, which is useful in tests."""

    function: Callable[P, R]
    definition: ToolDefinition
    signature: Signature | WholeArguments
    reconcile: Reconcile | None
    _preview: Preview | None
    _bulk_count: BulkCount | None
    # Limits if each call runs in its own process. None if calls run in the registry process.
    process: ProcessLimits | None = None
    # An execution that sends no report for this many seconds counts as lost. 0 means that no reports are required.
    heartbeat_seconds: float = 0.0
    # True if the function itself calls `ToolContext.mark_started` when the call may take effect.
    marks_start: bool = False
    # True if a cancelled call may keep running on its server, which is only notified.
    is_remote: bool = False
    # True if async code runs on the tools' event loop, which is separate from the registry's.
    on_tool_loop: bool = False
    # True if calls leave the registry for a source, a worker or another server.
    is_external: bool = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @property
    def is_stoppable(self) -> bool:
        """True if a cancelled call ends promptly. A call that runs in a thread cannot be stopped."""
        return self.is_async or self.process is not None

    def bind(self, arguments: Mapping[str, Any], context: ToolContext) -> Callable[[], R]:
        """Return a function that makes the call, for arguments that match the schema.

        Raises:
            ToolError: An argument matches the schema, but not the stricter type.
        """
        try:
            parameters = self.signature.bind(arguments)
        except (msgspec.ValidationError, pydantic.ValidationError) as error:
            raise ToolError(f"invalid arguments for {self.name}: {error}") from None
        if self.signature.context_parameter:
            parameters[self.signature.context_parameter] = context
        function: Callable[..., R] = self.function
        return lambda: function(**parameters)

    def preview(self, arguments: Mapping[str, Any]) -> Callable[[], str] | None:
        """Return a function that describes the call's effect, or None if the tool has no preview."""
        return _bound(self._preview, self.signature, arguments)

    def bulk_count(self, arguments: Mapping[str, Any]) -> Callable[[], int] | None:
        """Return a function that counts the affected items, or None if the tool has no `bulk_count`."""
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
    reports: str | Mapping[str, float | Sequence[int]] = ...,
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
    reports: str | Mapping[str, float | Sequence[int]] = "",
    preview: Preview | None = None,
    bulk_count: BulkCount | None = None,
    reconcile: Reconcile | None = None,
    process: ProcessLimits | None = None,
) -> Tool[P, R] | Callable[[Callable[P, R]], Tool[P, R]]:
    """Turn a sync or async function into a tool. See docs/guides/tools.md for the options. Their defaults are cautious.

    Raises:
        ToolDefinitionError: The function or an option is invalid.
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
    """Build a definition from the decorator's options.

    Raises:
        ToolDefinitionError: The description is missing, or an option has the wrong type or an invalid value.
    """
    if not fields["description"]:
        raise ToolDefinitionError(f"{fields['name']}: description is empty; write a docstring for the model")
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
    """Check that a tool's options are consistent, and return the tool.

    Raises:
        ToolDefinitionError: The options contradict each other.
    """
    definition = made.definition
    if (made.reconcile is not None) != (definition.effect is EffectClass.RECONCILABLE):
        raise ToolDefinitionError(f"{made.name}: reconcile must be set for the effect RECONCILABLE, and only for it")
    if made.heartbeat_seconds and not TIMEOUT_SECONDS_MIN <= made.heartbeat_seconds <= ASYNC_TIMEOUT_SECONDS_MAX:
        limits = f"{TIMEOUT_SECONDS_MIN} to {ASYNC_TIMEOUT_SECONDS_MAX:g}"
        raise ToolDefinitionError(f"{made.name}: heartbeat_seconds must be {limits}, got {made.heartbeat_seconds:g}")
    if made.heartbeat_seconds and definition.context is not ExecutionContext.BACKEND:
        raise ToolDefinitionError(f"{made.name}: heartbeat_seconds is only for tools that the registry runs")
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
    marks_start: bool = False,
    is_remote: bool = False,
) -> Tool[..., Any]:
    """Return a tool that forwards its calls to a worker, an MCP server or an HTTP endpoint.

    `forward` is a coroutine function that takes `arguments` (unchanged) and `context`. Checks, the journal, the
    timeout, cancellation, progress and secrets work as they do for a Python tool.
    """
    return Tool(
        function=forward,
        definition=definition,
        signature=WholeArguments(),
        reconcile=reconcile,
        _preview=preview,
        _bulk_count=None,
        marks_start=marks_start,
        is_remote=is_remote,
        is_external=True,
    )
