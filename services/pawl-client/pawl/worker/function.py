"""Functions as tools: their definitions, and the binding of call arguments."""

from __future__ import annotations

import inspect
import threading
import typing
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from pawl.chassis.process.tasks import Handover, save_nothing
from pawl.chassis.strict_json import dumps_canonical
from pawl.errors import InvalidJson
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import tool_pb2, worker_pb2

Category = Literal["SAFE", "SENSITIVE", "DESTRUCTIVE"]
EffectClass = Literal["READ_ONLY", "IDEMPOTENT", "RECONCILABLE", "AT_MOST_ONCE"]

# Returned by a `reconcile` function if the call had no effect and can no longer have one.
DID_NOT_HAPPEN: Final = object()


class ToolError(Exception):
    """Raise this to show an error text to the model. The text must not contain secrets.

    Other errors show only their type.
    """


class OutcomeUnknown(Exception):
    """Raise this if it is unknown whether the call took effect."""


class Superseded(ToolError):
    """Raised when the call was cancelled or moved to another worker. Let this exception propagate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """The call that a function is handling. A parameter with this annotation receives it. Thread-safe."""

    store_id: str
    user_id: str
    conversation_id: str
    run_id: str
    # Also the idempotency key: the same for every execution of the call.
    call_id: str
    attempt: int
    deadline: datetime
    # Reports progress: a fraction between 0 and 1 or None, and human-readable text.
    progress: Callable[[float | None, str], None]
    # Set when the result is no longer wanted. Async functions are also cancelled.
    cancelled: threading.Event = field(default_factory=threading.Event)
    # The latest value that an earlier execution saved with `checkpoint`, or None.
    last_checkpoint: Any = None
    # W3C `traceparent` of the call, to send with the function's own requests; empty if there is none.
    traceparent: str = ""
    _save: Callable[[bytes], Future[None]] = save_nothing

    def checkpoint(self, value: Any) -> Handover:
        """Save progress, so that the next execution finds the latest value in `last_checkpoint`.

        In an async function, await this. In a sync function, it returns once the value is saved. A saved value survives
        the end of any process. It must be JSON of at most 16 KiB.

        Raises:
            Superseded: The call was cancelled or moved to another worker.
            ToolError: The value is not strict JSON or is too large, or the registry does not support checkpoints.
        """
        try:
            content = dumps_canonical(msgspec.to_builtins(value, str_keys=True))
        except (TypeError, ValueError, RecursionError, InvalidJson, msgspec.MsgspecError) as error:
            raise ToolError(f"a checkpoint must be JSON: {error}") from None
        return Handover(self._save(content))


class Function:
    """A function with its tool definition. Parameters may have any type that msgspec can describe as JSON Schema."""

    def __init__(self, function: Callable[..., Any], reconcile: Callable[..., Any] | None, **options: Any) -> None:
        self.function, self.reconcile = function, reconcile
        hints = typing.get_type_hints(function, include_extras=True)
        self._context = next((name for name, hint in hints.items() if hint is CallContext), "")
        if unknown := [name for name in inspect.signature(function).parameters if name not in hints]:
            problem = f"parameter {unknown[0]} has no type: add one, for example {unknown[0]}: str"
            raise TypeError(f"{function.__name__}: {problem}")
        fields = [
            (name, hints[name]) if parameter.default is parameter.empty else (name, hints[name], parameter.default)
            for name, parameter in inspect.signature(function).parameters.items()
            if name != self._context
        ]
        self._arguments = msgspec.defstruct(function.__name__, fields, kw_only=True, forbid_unknown_fields=True)
        (_,), parts = msgspec.json.schema_components((self._arguments,), ref_template="#/$defs/{name}")
        schema = parts.pop(function.__name__) | ({"$defs": parts} if parts else {})
        self.definition = tool_pb2.ToolDefinition(
            **{"name": function.__name__, "description": inspect.getdoc(function) or ""} | options,
            arguments_schema_json=msgspec.json.encode(schema),
            context=call_pb2.EXECUTION_CONTEXT_BACKEND,
        )

    def bind(self, call: worker_pb2.Invocation, context: CallContext) -> Callable[[], Any]:
        """Return a function that runs the call, or reconciles it."""
        if call.purpose == worker_pb2.INVOCATION_PURPOSE_RECONCILE:
            reconcile = self.reconcile
            if reconcile is None:
                raise OutcomeUnknown
            return lambda: reconcile(context)
        struct = msgspec.json.decode(call.arguments_json, type=self._arguments)
        values = {name: getattr(struct, name) for name in struct.__struct_fields__}
        return lambda: self.function(**values, **({self._context: context} if self._context else {}))
