"""A function as a tool: its definition, and how a call of it is made."""

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

from pawl.chassis.process.tasks import Handover, kept
from pawl.chassis.strict_json import dumps_canonical
from pawl.errors import InvalidJson
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import tool_pb2, worker_pb2

Category = Literal["SAFE", "SENSITIVE", "DESTRUCTIVE"]
EffectClass = Literal["READ_ONLY", "IDEMPOTENT", "RECONCILABLE", "AT_MOST_ONCE"]

DID_NOT_HAPPEN: Final = object()
"""The value that a `reconcile` function returns if the call had no effect and can have none any more."""


class ToolError(Exception):
    """An error whose text is for the model, so it holds no secret. Of any other the model learns the type only."""


class OutcomeUnknown(Exception):
    """Nobody knows whether the call had its effect."""


class Superseded(ToolError):
    """The call was cancelled, or is another worker's by now. Let it pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """The call that a function serves; a parameter annotated with this class gets it. Safe in any thread."""

    store_id: str
    user_id: str
    conversation_id: str
    run_id: str
    call_id: str
    """Also the idempotency key: the same for every execution of the call."""
    attempt: int
    deadline: datetime
    progress: Callable[[float | None, str], None]
    """Says how far it is, from 0 to 1 if known, and what it does, for people."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when the result is not wanted any more; async functions are cancelled besides."""
    last_checkpoint: Any = None
    """The newest value that earlier executions of this call have kept by `checkpoint`; None if they kept none."""
    _save: Callable[[bytes], Future[None]] = kept

    def checkpoint(self, value: Any) -> Handover:
        """Keep how far the call is: an execution that begins it again finds the newest value in `last_checkpoint`.

        To be awaited in an async function; in a sync one it returns when the value is
        kept, which survives the end of every process then. It is JSON of at most 16 KiB.

        Raises:
            Superseded: the call was cancelled, or is another worker's by now.
            ToolError: the value is no JSON that the registry takes, is too large, or the registry keeps no
                checkpoints yet.
        """
        try:
            content = dumps_canonical(msgspec.to_builtins(value, str_keys=True))
        except (TypeError, ValueError, RecursionError, InvalidJson, msgspec.MsgspecError) as error:
            raise ToolError(f"a checkpoint must be JSON: {error}") from None
        return Handover(self._save(content))


class Function:
    """A function with its definition; parameters may be of any type that msgspec makes a schema of."""

    def __init__(self, function: Callable[..., Any], reconcile: Callable[..., Any] | None, **options: Any) -> None:
        self.function, self.reconcile = function, reconcile
        hints = typing.get_type_hints(function, include_extras=True)
        self._context = next((name for name, hint in hints.items() if hint is CallContext), "")
        if unknown := [name for name in inspect.signature(function).parameters if name not in hints]:
            problem = f"parameter {unknown[0]} has no type; write for example {unknown[0]}: str"
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
        """Return the call that is asked for, with what its parameters are, or that of `reconcile`."""
        if call.purpose == worker_pb2.INVOCATION_PURPOSE_RECONCILE:
            reconcile = self.reconcile
            if reconcile is None:
                raise OutcomeUnknown
            return lambda: reconcile(context)
        struct = msgspec.json.decode(call.arguments_json, type=self._arguments)
        values = {name: getattr(struct, name) for name in struct.__struct_fields__}
        return lambda: self.function(**values, **({self._context: context} if self._context else {}))
