"""Reading the keyboard beside everything else."""

from __future__ import annotations

import asyncio
import os

from pawl.cli.lines import LineReader


async def test_a_line_that_nobody_waited_for_any_more_goes_to_the_next_who_asks() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as source, os.fdopen(writing, "w") as keyboard:
        reader = LineReader(source)
        impatient = asyncio.create_task(reader.line())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        keyboard.write("first\nsecond")
        keyboard.flush()
        assert await asyncio.wait_for(reader.line(), 60) == "first"
        keyboard.close()
        assert await asyncio.wait_for(reader.line(), 60) == "second"
        assert await asyncio.wait_for(reader.line(), 60) is None
