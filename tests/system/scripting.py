"""The scripted model server of a suite, told what to say."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import httpx2

from pawl.launcher.suite import Suite

Step: TypeAlias = dict[str, Any]

_NUMBERS = itertools.count(1)


class Model:
    """The scripted model server of the suite, as another process."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def play(self, *steps: Step) -> str:
        """Let it answer a prompt by these steps alone; returns the prompt."""
        prompt = f"scene {next(_NUMBERS)}!"
        own = [{**step, "when": {"user_contains": prompt, **step.get("when", {})}} for step in steps]
        answer = await self._http.post("/_pawl/script", json={"steps": own})
        assert answer.status_code == httpx2.codes.OK, answer.text
        return prompt

    async def forget(self) -> None:
        """Let it follow its rules again."""
        await self._http.post("/_pawl/script", json={"steps": []})

    async def content(self, prompt: str) -> Any:
        """What the newest request said in the user message with the prompt."""
        requests = (await self._http.get("/_pawl/requests")).json()["requests"]
        every = [message for request in requests for message in request["body"]["messages"]]
        told = [each["content"] for each in every if each["role"] == "user" and prompt in str(each["content"])]
        return told[-1]

    async def outcomes(self, prompt: str) -> list[str]:
        """What became of the requests whose last user message has the prompt."""
        requests = (await self._http.get("/_pawl/requests")).json()["requests"]
        return [request["outcome"] for request in requests if prompt in str(request["body"]["messages"])]


@asynccontextmanager
async def scripted(suite: Suite) -> AsyncIterator[Model]:
    """The model server; afterwards it follows its rules again."""
    base_url = (suite.endpoints.model_base_url or "").removesuffix("/v1")
    async with httpx2.AsyncClient(base_url=base_url, timeout=60.0) as http:
        model = Model(http)
        yield model
        await model.forget()
