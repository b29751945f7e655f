"""Structured answers: JSON that matches a response format's schema."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from pawl.agent_loop.loop.rules.assembly import ModelAnswer
from pawl.agent_loop.loop.rules.message import Message
from pawl.agent_loop.loop.rules.run import FailureClass, ResponseFormat, RoundLimitPolicy, RunFailure
from pawl.agent_loop.loop.rules.state import State

# The run fails after this many answers that do not match the format.
TRIES_MAX: Final = 3
# Failure reason of a run without a matching answer.
OUTPUT_INVALID: Final = "OUTPUT_INVALID"

_DEFAULT_NAME: Final = "answer"
_FAULTS_SHOWN_CHARACTERS: Final = 500
# Models often wrap JSON in a Markdown code block.
_BLOCK: Final = re.compile(r"```[A-Za-z]*[ \t]*\r?\n(?P<inside>.*)\n[ \t]*```", re.DOTALL)


def asked(form: ResponseFormat) -> dict[str, Any]:
    """Return a response format as the chat-completions protocol defines it."""
    return {
        "type": "json_schema",
        "json_schema": {
            "name": form.name or _DEFAULT_NAME,
            "schema": msgspec.json.decode(form.schema_json),
            "strict": form.strict,
        },
    }


def document(text: str) -> str:
    """Return the JSON document in an answer.

    If the text is a single Markdown code block, its contents are the document.
    """
    whole = text.strip()
    block = _BLOCK.fullmatch(whole)
    return block["inside"].strip() if block and "```" not in block["inside"] else whole


def is_refusal(answer: ModelAnswer) -> bool:
    return bool(answer.refusal.strip()) and not answer.text.strip()


def may_be_tried_again(state: State) -> bool:
    options, round_number = state.run.options, state.run.round
    rounds_max = options.limits.rounds_max + (options.round_limit_policy is RoundLimitPolicy.FINAL_ANSWER)
    return state.loop.misfits < TRIES_MAX and round_number < rounds_max


def correction(answer: Message, form: ResponseFormat | None) -> str:
    """Return the correction to send to the model after `answer`, which does not match the schema.

    With `form`, the correction includes the schema.
    """
    faults = "\n".join(f"- {fault}" for fault in answer.misfit.splitlines())
    head = f"[This answer does not have the requested format:\n{faults}"
    if form is None:
        return f"{head}]"
    schema = form.schema_json.decode()
    return f"{head}\nAnswer again with only JSON that fits this JSON Schema:\n{schema}]"


def failure(answer: Message) -> RunFailure:
    faults = "; ".join(answer.misfit.splitlines())[:_FAULTS_SHOWN_CHARACTERS]
    message = f"The model did not answer in the requested format: {faults}"
    return RunFailure(failure_class=FailureClass.LIMIT, reason=OUTPUT_INVALID, message=message)
