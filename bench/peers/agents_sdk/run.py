"""The OpenAI Agents SDK with its SQLite session. Items are stored in each turn, but the loop itself is not durable."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from agents import Agent, OpenAIChatCompletionsModel, Runner, SQLiteSession, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parents[1]))
import driver


async def main() -> None:
    options = driver.options()
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=options.model, api_key="none", max_retries=0)
    model = OpenAIChatCompletionsModel(model="canned", openai_client=client)
    agent = Agent(name="bench", model=model, tools=[function_tool(driver.look_up)])

    async def run(run_id: str) -> str:
        session = SQLiteSession(run_id, options.data / "sessions.sqlite")
        try:
            result = Runner.run_streamed(agent, driver.QUESTION, session=session)
            async for _ in result.stream_events():
                pass
            return str(result.final_output)
        finally:
            session.close()

    await driver.obey(run)


asyncio.run(main())
