"""A client of the suite's scripted model server."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import httpx2

from pawl.launcher.suite import Suite

Step: TypeAlias = dict[str, Any]

_NUMBERS = itertools.count(1)


class Model:
    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http

    async def play(self, *steps: Step) -> str:
        prompt = f"scene {next(_NUMBERS)}!"
        own = [{**step, "when": {"user_contains": prompt, **step.get("when", {})}} for step in steps]
        await self.obey({"steps": own})
        return prompt

    async def obey(self, script: Mapping[str, Any]) -> None:
        answer = await self._http.post("/_pawl/script", json=script)
        assert answer.status_code == httpx2.codes.OK, answer.text


@asynccontextmanager
async def scripted(suite: Suite) -> AsyncIterator[Model]:
    base_url = (suite.endpoints.model_base_url or "").removesuffix("/v1")
    async with httpx2.AsyncClient(base_url=base_url, timeout=60.0) as http:
        model = Model(http)
        yield model
        await model.obey({"steps": []})
