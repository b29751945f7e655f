"""The public API for writing tools.

    from pawl.tools import tool

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def get_weather(city: Annotated[str, "for example Oslo"], days: int = 1) -> dict[str, str]:
        '''Get the weather forecast of a city.'''

See docs/guides/tools.md.
"""

from pawl.tools.sdk.completion import Awaited, CompletionToken
from pawl.tools.sdk.context import (
    OutcomeUnknown,
    QuestionDeclined,
    SecretNotFound,
    Superseded,
    ToolCancelled,
    ToolContext,
    ToolError,
)
from pawl.tools.sdk.inverse import Inverse, Reversible
from pawl.tools.sdk.process import ProcessLimits
from pawl.tools.sdk.reconciling import ReconcileResult, cannot_say, did_not_happen, happened
from pawl.tools.sdk.signature import ToolDefinitionError
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass, ExecutionContext

__all__ = [
    "Awaited",
    "Category",
    "CompletionToken",
    "EffectClass",
    "ExecutionContext",
    "Inverse",
    "OutcomeUnknown",
    "ProcessLimits",
    "QuestionDeclined",
    "ReconcileResult",
    "Reversible",
    "SecretNotFound",
    "Superseded",
    "Tool",
    "ToolCancelled",
    "ToolContext",
    "ToolDefinitionError",
    "ToolError",
    "cannot_say",
    "did_not_happen",
    "happened",
    "tool",
]
