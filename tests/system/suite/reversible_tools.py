"""Tools with reversible effects that can be counted from outside: lines of a file."""

from __future__ import annotations

from pawl.tools import Category, EffectClass, Inverse, Reversible, ToolError, tool
from tests.system.suite.effect_file import effect_file, held
from tests.system.suite.slow_tools import note


@tool(category=Category.SAFE, effect=EffectClass.AT_MOST_ONCE)
def put_line(path: str, line: str, holds: bool = False) -> Reversible:
    """Add a line to a file. With `holds`, its inverse waits for the test."""
    note(path, line)
    arguments = {"path": path, "line": line, "holds": holds}
    inverse = Inverse(tool_name="take_line", arguments=arguments, summary=f"Take {line!r} out")
    return Reversible(value={"put": line}, inverse=inverse)


@tool(category=Category.SAFE, effect=EffectClass.AT_MOST_ONCE)
async def take_line(path: str, line: str, holds: bool = False) -> str:
    """Remove the last line of a file if it is this one."""
    if holds:
        await held(path)
    lines = effect_file(path).read_text(encoding="utf-8").splitlines()
    if not lines or lines[-1] != line:
        raise ToolError(f"the last line is not {line!r} any more")
    effect_file(path).write_text("".join(f"{each}\n" for each in lines[:-1]), encoding="utf-8")
    return "taken"
