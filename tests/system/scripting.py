"""The scripted model server of a suite, told what to say."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
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
        return (await self.play_all([steps]))[0]

    async def play_all(self, scenes: Sequence[Sequence[Step]]) -> list[str]:
        """Let it answer a prompt for each of some scenes, by the steps of that scene; returns the prompts."""
        prompts = [f"scene {next(_NUMBERS)}!" for _ in scenes]
        own = [
            {**step, "when": {"user_contains": prompt, **step.get("when", {})}}
            for prompt, steps in zip(prompts, scenes, strict=True)
            for step in steps
        ]
        await self.obey({"steps": own})
        return prompts

    async def obey(self, script: Mapping[str, Any]) -> None:
        """Let it answer by a whole script."""
        answer = await self._http.post("/_pawl/script", json=script)
        assert answer.status_code == httpx2.codes.OK, answer.text

    async def forget(self) -> None:
        """Let it follow its rules again."""
        await self.obey({"steps": []})

    async def outcomes(self, prompt: str) -> list[str]:
        """How the requests ended whose messages have the prompt."""
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
