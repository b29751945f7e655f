"""Answers in the form that a run was asked for: JSON that fits a schema."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from pawl.agent_loop.loop.rules.assembly import ModelAnswer
from pawl.agent_loop.loop.rules.message import Message
from pawl.agent_loop.loop.rules.run import FailureClass, ResponseFormat, RoundLimitPolicy, RunFailure
from pawl.agent_loop.loop.rules.state import State

TRIES_MAX: Final = 3
"""Most answers of a run that do not fit."""
OUTPUT_INVALID: Final = "OUTPUT_INVALID"
"""The run ended without an answer that fits."""

_DEFAULT_NAME: Final = "answer"
_FAULTS_SHOWN_CHARACTERS: Final = 500
# As models write JSON for people: the whole answer is one block of Markdown.
_BLOCK: Final = re.compile(r"```[A-Za-z]*[ \t]*\r?\n(?P<inside>.*)\n[ \t]*```", re.DOTALL)


def asked(form: ResponseFormat) -> dict[str, Any]:
    """Return a response format as the chat-completions protocol has it."""
    return {
        "type": "json_schema",
        "json_schema": {
            "name": form.name or _DEFAULT_NAME,
            "schema": msgspec.json.decode(form.schema_json),
            "strict": form.strict,
        },
    }


def document(text: str) -> str:
    """Return the JSON that an answer is meant to be: its text, or what stands in the one block that it consists of."""
    whole = text.strip()
    block = _BLOCK.fullmatch(whole)
    return block["inside"].strip() if block and "```" not in block["inside"] else whole


def is_refusal(answer: ModelAnswer) -> bool:
    """Return whether the model refuses to answer, which needs no form."""
    return bool(answer.refusal.strip()) and not answer.text.strip()


def may_be_tried_again(state: State) -> bool:
    """Return whether the model may be told what is wrong with its last answer, and called once more."""
    options, round_number = state.run.options, state.run.round
    rounds_max = options.limits.rounds_max + (options.round_limit_policy is RoundLimitPolicy.FINAL_ANSWER)
    return state.loop.misfits < TRIES_MAX and round_number < rounds_max


def correction(answer: Message, form: ResponseFormat | None) -> str:
    """Return what the model is told of an answer that does not fit; with `form` also what would fit."""
    faults = "\n".join(f"- {fault}" for fault in answer.misfit.splitlines())
    told = f"[This answer does not have the form that was asked for:\n{faults}"
    if form is None:
        return f"{told}]"
    schema = form.schema_json.decode()
    return f"{told}\nAnswer again, with JSON and nothing else, which fits this JSON Schema:\n{schema}]"


def failure(answer: Message) -> RunFailure:
    """Return why a run fails whose last answer does not fit."""
    faults = "; ".join(answer.misfit.splitlines())[:_FAULTS_SHOWN_CHARACTERS]
    message = f"The model did not answer in the form that was asked for: {faults}"
    return RunFailure(failure_class=FailureClass.LIMIT, reason=OUTPUT_INVALID, message=message)
