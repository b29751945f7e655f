"""Implements `pawl model check URL`, which tests a model server and prints suitable settings."""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import msgspec
import openai
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import output, parts
from pawl.agent_loop.loop.rules.assembly import Assembly, ModelAnswer, is_json
from pawl.agent_loop.loop.rules.history import ReasoningEcho
from pawl.agent_loop.loop.rules.parts import ImagePart, Part
from pawl.agent_loop.loop.rules.run import ResponseFormat
from pawl.agent_loop.model.client import OpenAiModel, OutputTokensField, body_of
from pawl.agent_loop.model.request import ModelError, ModelRequest

_FEW_TOKENS: Final = 16
_SECONDS: Final = 120.0
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
_FORM: Final = ResponseFormat(
    schema_json=b'{"type":"object","properties":{"sum":{"type":"integer"}},"required":["sum"]}'
)
# A PNG image of a red square, 64 by 64 pixels.
_RED_PNG: Final = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAS0lEQVR42u3PQQkAAAgAsetfWiP4FgYrsKZeS0BA"
    "QEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEDgsqnc8OJg6Ln3AAAAAElFTkSuQmCC"
)
_LONG: Final = ({"role": "user", "content": "count to 500"},)
_ASK: Final = ({"role": "user", "content": 'call add_numbers with {"a": 2, "b": 3}'},)


@dataclass(slots=True, kw_only=True)
class Report:
    lines: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)

    def add(self, mark: Literal["ok", "note", "FAIL"], text: str) -> None:
        """Add a finding. `note` marks a limitation. `FAIL` marks a server that runs cannot use."""
        self.lines.append(f"{mark:<6}{text}")

    @property
    def works(self) -> bool:
        return not any(line.startswith("FAIL") for line in self.lines)


class Probe:
    """A test of one model server, through the same client that runs use."""

    def __init__(self, base_url: str, api_key: str, model: str) -> None:
        self._base_url = base_url
        self._api_key = api_key
        self._model = model
        self._field: OutputTokensField = "max_completion_tokens"
        self.report = Report()

    async def run(self) -> Report:
        self.report.settings = {"OPENAI_BASE_URL": self._base_url, "PAWL_MODEL": self._model}
        try:
            await self._stream()
            await self._limit()
            await self._tools()
            await self._form()
            await self._image()
        except ModelError as error:
            self.report.add("FAIL", error.problem.message)
        return self.report

    async def _stream(self) -> None:
        answer = await self._answer(_ask("say hello"))
        report = self.report
        report.add("ok", f"it streams its answer (finish reason {answer.finish_reason or 'none'!r})")
        if answer.empty:
            report.add("FAIL", "the answer had neither text nor a call")
        if not answer.finish_reason:
            report.add("note", "no finish reason: only `[DONE]` marks the end of an answer")
        if answer.usage.input_tokens and answer.usage.output_tokens:
            report.add("ok", "it reports token usage")
        else:
            report.add("note", "it does not report token usage: Pawl estimates three bytes per token")
        if "<think>" in answer.text:
            report.add(
                "note",
                "it sends reasoning in the text, as <think>: let the server separate it (docs/guides/model-server.md)",
            )
        elif answer.reasoning:
            report.add("ok", "it sends reasoning separately from the text")

    async def _limit(self) -> None:
        """Find the request field that limits the length of an answer. Token budgets need this field."""
        for name in ("max_completion_tokens", "max_tokens"):
            self._field = name
            try:
                answer = await self._answer(replace(_ask(""), messages=_LONG, output_tokens_max=_FEW_TOKENS))
            except ModelError as error:
                if error.problem.retryable:
                    raise
                continue
            if answer.cut_off:
                self.report.add("ok", f"{name} limits an answer, and the finish reason reports it")
                self.report.settings["PAWL_OUTPUT_TOKENS_FIELD"] = name
                return
        self._field = "max_completion_tokens"
        self.report.add("note", "no field limits an answer: runs can exceed their token budgets")

    async def _tools(self) -> None:
        asking = replace(_ask(""), messages=_ASK, tools=(_TOOL,))
        answer = await self._answer(asking)
        if not answer.calls:
            self.report.add("FAIL", "it did not call the requested tool: runs have no tools with this model")
            return
        call = answer.calls[0]
        if call.name != "add_numbers" or not is_json(call.arguments, dict):
            self.report.add("FAIL", f"its call cannot be read: {call.name[:100]!r} with {call.arguments[:100]!r}")
            return
        self.report.add("ok", "it calls tools")
        echoes = [ReasoningEcho.AUTO, ReasoningEcho.NONE, ReasoningEcho.REASONING] if answer.reasoning else ["auto"]
        for echo in echoes:
            try:
                last = await self._answer(replace(asking, messages=_with_result(answer, echo)))
            except ModelError as error:
                if error.problem.retryable or echo == echoes[-1]:
                    self.report.add("FAIL", f"it does not accept a call's result: {error.problem.message}")
                    return
                continue
            self.report.settings["PAWL_REASONING_ECHO"] = str(echo)
            verb = "answers with" if last.text.strip() else "accepts"
            self.report.add("ok", f"it {verb} a call's result")
            return

    async def _form(self) -> None:
        """Check whether the server follows a response format. Runs work without this, because they validate answers."""
        try:
            answer = await self._answer(replace(_ask("What is 2 + 3?"), response_format=output.asked(_FORM)))
        except ModelError as error:
            self.report.add("note", f"it refuses response_format: {error.problem.message}")
            return
        if is_json(answer.text, dict):
            self.report.add("ok", "it follows response_format")
        else:
            self.report.add("note", "it ignores response_format: structured answers take an extra round")

    async def _image(self) -> None:
        asked = [
            Part(text="Which colour is this? Answer with one word."),
            Part(image=ImagePart(media_type="image/png", data=base64.b64decode(_RED_PNG))),
        ]
        content = parts.content(asked, takes_images=True)
        try:
            answer = await self._answer(replace(_ask(""), messages=({"role": "user", "content": content},)))
        except ModelError as error:
            self.report.add("note", f"it does not accept images: {error.problem.message}")
            return
        if "red" not in answer.text.lower():
            self.report.add("note", "it accepts images, but its answer does not show that it sees them")
            return
        self.report.add("ok", "it sees images")
        self.report.settings["PAWL_MODEL_INPUT"] = "text,image"

    async def _answer(self, request: ModelRequest) -> ModelAnswer:
        assembly = Assembly()
        asked = replace(request, model=self._model)
        async with (
            OpenAiModel(
                base_url=self._base_url, api_key=self._api_key, body=partial(body_of, output_tokens_field=self._field)
            ) as model,
            aclosing(model.stream(asked)) as pieces,
        ):
            async for piece in pieces:
                assembly.add(piece)
        return assembly.answer()


def _ask(text: str) -> ModelRequest:
    return ModelRequest(model="", messages=({"role": "user", "content": text},), deadline_seconds=_SECONDS)


def _with_result(answer: ModelAnswer, echo: str) -> tuple[dict[str, Any], ...]:
    call = answer.calls[0]
    function = {"name": call.name, "arguments": call.arguments}
    asked: dict[str, Any] = {
        "role": "assistant",
        "content": answer.text or None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    if answer.reasoning and echo != ReasoningEcho.NONE:
        asked["reasoning" if echo == ReasoningEcho.REASONING else "reasoning_content"] = answer.reasoning
    result = {"role": "tool", "tool_call_id": "call_1", "content": msgspec.json.encode({"sum": 5}).decode()}
    return (*_ASK, asked, result)


async def first_model(base_url: str, api_key: str) -> str:
    """Return the first model that a server lists. Return an empty string if it lists none or the request fails."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key or "none", max_retries=0, timeout=30.0) as client:
        try:
            page = await client.models.list()
        except (openai.OpenAIError, ValueError):
            return ""
        return page.data[0].id if page.data else ""


async def check(base_url: str, api_key: str, model: str) -> Report:
    """Test a model server. If `model` is empty, use the first model that the server lists."""
    model = model or await first_model(base_url, api_key)
    if not model:
        report = Report()
        report.add("FAIL", "it lists no models or cannot be reached: specify a model with --model")
        return report
    return await Probe(base_url, api_key, model).run()


def main(arguments: Sequence[str]) -> int:
    """Test a server and print the findings. Return 1 if runs cannot use the server."""
    parser = argparse.ArgumentParser(
        prog="pawl model check", description="Probe a model server and print settings for it."
    )
    parser.add_argument("url", help="base URL, for example http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="", help="model; default: the first one that the server lists")
    given = parser.parse_args(arguments)
    if not given.url.startswith(("http://", "https://")):
        parser.error(f"the URL must start with http:// or https://, got {given.url!r}")
    report = asyncio.run(check(given.url.rstrip("/"), os.environ.get("OPENAI_API_KEY", ""), given.model))
    print("\n".join(report.lines))
    if report.settings:
        print("\nSettings:\n" + "\n".join(f"{name}={value}" for name, value in report.settings.items()))
    return 0 if report.works else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
