"""LangGraph: an agent with a checkpointer, as in its documentation. Each step is durable before the next ("sync").

The checkpoints are in PostgreSQL with `--database`, otherwise in SQLite.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

sys.path.insert(0, str(Path(__file__).parents[1]))
import driver


async def main() -> None:
    options = driver.options()
    async with AsyncExitStack() as stack:
        saver: Any
        if options.database:
            settings = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
            pool = AsyncConnectionPool(options.database, min_size=8, max_size=32, kwargs=settings, open=False)
            saver = AsyncPostgresSaver(await stack.enter_async_context(pool))
            await saver.setup()
        else:
            path = str(options.data / "checkpoints.sqlite")
            saver = await stack.enter_async_context(AsyncSqliteSaver.from_conn_string(path))
        model = ChatOpenAI(model="canned", base_url=options.model, api_key="none", max_retries=0, stream_usage=True)
        agent: Any = create_agent(model, tools=[driver.look_up], checkpointer=saver)

        async def run(run_id: str) -> str:
            text = ""
            question = {"messages": [{"role": "user", "content": driver.QUESTION}]}
            config = {"configurable": {"thread_id": run_id}}
            async for part, _ in agent.astream(question, config, stream_mode="messages", durability="sync"):
                if part.type == "AIMessageChunk":
                    text += str(part.content)
            return text

        await driver.obey(run)


asyncio.run(main())
