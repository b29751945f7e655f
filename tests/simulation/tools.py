"""The tools of a simulation: one of each kind."""

from __future__ import annotations

from pawl.agent_loop.loop.rules.tool import Verdict
from pawl.values import EffectClass, OfferFallback, Question
from tests.fakes.registry import tool

TOOLS: dict[str, Verdict] = {
    "look": tool(effect="READ_ONLY", parallel=True),
    "note": tool(effect="IDEMPOTENT"),
    "pay": tool(effect="AT_MOST_ONCE", parallel=True),
    "book": tool(effect="RECONCILABLE"),
    "mail": tool("APPROVE", effect="AT_MOST_ONCE"),
    "show": tool("OFFER", context="FRONTEND"),
    "draw": tool(
        "OFFER",
        context="FRONTEND",
        offer_fallback=OfferFallback.BACKEND_TOOL,
        fallback_tool_name="note",
    ),
    "pick": tool("OFFER", context="FRONTEND", offer_fallback=OfferFallback.ASK_USER, question=Question(question="?")),
    "hire": tool("DELEGATE", context="AGENT", effect="IDEMPOTENT"),
    "ask": tool("ASK", context="HUMAN", question=Question(question="Which colour?")),
}

FRONT_END = ("show", "draw", "pick")
# A front-end tool that is not registered: it comes with runs.
OWN = "sketch"
BACK_END = ("look", "note", "pay", "book", "mail")


def effect_class(name: str) -> EffectClass:
    return TOOLS[name].effect_class or EffectClass.AT_MOST_ONCE
