"""Translates tool definitions between pawl.tool.v1 messages and structs."""

from __future__ import annotations

from typing import Final

from pawl.chassis.rpc.translate import Exceptions, Translator, Unknown
from pawl.chassis.strict_json import dumps_canonical
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2, run_pb2
from pawl.tool.v1 import tool_pb2
from pawl.tools.rules.definition import ToolDefinition
from pawl.tools.rules.schema import read_schema
from pawl.values import Category, EffectClass, JobReports, OfferFallback, ReportPolicy


def _no_value(unknown: Unknown) -> InvalidField:
    name = unknown.field.rpartition(".")[2]
    return InvalidField(f"{name}: {unknown.number} is not a known value", field=unknown.field)


WIRE: Final = Translator(
    _no_value,
    # Unspecified values default to the most cautious ones.
    defaults={
        Category: Category.SENSITIVE,
        EffectClass: EffectClass.AT_MOST_ONCE,
        OfferFallback: OfferFallback.FAIL,
        JobReports: JobReports.EVERY,
    },
)
CATEGORIES: Final = WIRE.enum(Category, call_pb2.ToolCategory)
EFFECTS: Final = WIRE.enum(EffectClass, call_pb2.EffectClass, field="effect_class")
REPORTS: Final = WIRE.struct(ReportPolicy, run_pb2.ReportPolicy)
DEFINITION: Final = WIRE.struct(
    ToolDefinition,
    tool_pb2.ToolDefinition,
    Exceptions(
        read={
            "arguments_schema": lambda message: read_schema(message.arguments_schema_json),
            "effect": lambda message: EFFECTS.read(message.effect_class),
        },
        write={
            "arguments_schema_json": lambda definition: dumps_canonical(dict(definition.arguments_schema)),
            "effect_class": lambda definition: EFFECTS.write(definition.effect),
        },
        of_struct=("bulk_count",),
    ),
)
