"""Entry point of `python -m pawl.tool_registry.check`, which `pawl tools check` runs."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.process.start import StartError
from pawl.server.process import log_setup
from pawl.tool_registry.check.calling import Caller, call
from pawl.tool_registry.secret_file import FileSecrets
from pawl.tool_registry.settings import module_names
from pawl.tool_registry.sources.python.modules import ToolModule, load_modules
from pawl.tools.rules.pointers import resolve
from pawl.tools.rules.schema import did_you_mean
from pawl.tools.sdk.context import ToolContext
from pawl.tools.sdk.tool import Tool

_EXIT_UNSUCCESSFUL: Final = 1
_EXIT_IMPOSSIBLE: Final = 2
_DEFAULTS: Final = ToolContext()


# Errors fail the check; warnings do not.
ERROR: Final = "error"
WARNING: Final = "warning"


def main(arguments: Sequence[str]) -> int:
    options = _read(arguments)
    # This command prints problems in plain text, so logging is turned off.
    log_setup.configure(service="tools", instance_id="check", level="critical", log_format="auto")
    sys.path.insert(0, str(Path.cwd()))
    entries = options.tools or module_names(os.environ.get("PAWL_TOOLS", ""))
    if not entries:
        _complain("specify a module, a package or a folder, or set PAWL_TOOLS")
        return _EXIT_IMPOSSIBLE
    modules = list(load_modules(entries))
    tools: dict[str, Tool[..., Any]] = {}
    errors = _show_all(modules, tools)
    if not options.call:
        return _EXIT_UNSUCCESSFUL if errors else 0
    if options.call not in tools:
        _complain(f"there is no tool {options.call!r}{did_you_mean(options.call, tools)}")
        return _EXIT_IMPOSSIBLE
    try:
        file = os.environ.get("PAWL_TOOL_SECRETS_FILE")
        secrets = FileSecrets.read(Path(file) if file else None)
    except StartError as error:
        _complain(str(error))
        return _EXIT_IMPOSSIBLE
    caller = Caller(store_id=StoreId(options.store), user_id=UserId(options.user), secrets=secrets)
    _say("")
    succeeded = asyncio.run(call(tools[options.call], options.args.encode(), caller, _say))
    return 0 if succeeded and not errors else _EXIT_UNSUCCESSFUL


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="pawl tools check",
        description="Check Python tools as the registry would load them, without a deployment or a model.",
        epilog="Exits with 1 if a module is broken, a name is taken twice, or the call did not succeed.",
        allow_abbrev=False,
    )
    parser.add_argument("tools", nargs="*", metavar="MODULE", help="module, package or folder (default: PAWL_TOOLS)")
    parser.add_argument("--call", metavar="NAME", help="run this tool once on this machine, with all its effects")
    parser.add_argument("--args", metavar="JSON", default="{}", help="arguments of the call")
    parser.add_argument("--store", metavar="ID", default=_DEFAULTS.store_id, help="store of the call")
    parser.add_argument("--user", metavar="ID", default=_DEFAULTS.user_id, help="user of the call")
    return parser.parse_args(arguments)


def _show_all(modules: Sequence[ToolModule], tools: dict[str, Tool[..., Any]]) -> int:
    owners: dict[str, str] = {}
    errors = warnings = 0
    for module in modules:
        _say(module.name)
        if module.error:
            errors += 1
            _say(f"  error: {module.error}")
        for tool in module.tools:
            found = list(_findings(tool))
            if tool.name in owners:
                text = f"the name is taken by a tool in {owners[tool.name]}; the registry would skip this one"
                found.append((ERROR, text))
            owners.setdefault(tool.name, module.name)
            tools.setdefault(tool.name, tool)
            _show(tool, found)
            kinds = [kind for kind, _ in found]
            errors, warnings = errors + kinds.count(ERROR), warnings + kinds.count(WARNING)
    _say(f"{_count(len(tools), 'tool')}, {_count(errors, 'error')}, {_count(warnings, 'warning')}")
    return errors


def _findings(tool: Tool[..., Any]) -> Iterator[tuple[str, str]]:
    schema = tool.definition.arguments_schema
    for name, part in schema.get("properties", {}).items():
        if "description" not in part and "description" not in _target(schema, part):
            text = f"parameter {name} has no description (from Args: in the docstring, or a string in Annotated)"
            yield WARNING, text
    if tool.process is not None and not _is_found(tool):
        yield (
            ERROR,
            f"it must be a top-level name of its module {tool.function.__module__}, so that its process can find it",
        )


def _target(schema: Any, part: Any) -> Any:
    resolved = resolve(schema, part)
    return resolved if isinstance(resolved, dict) else {}


def _is_found(tool: Tool[..., Any]) -> bool:
    names = vars(sys.modules[tool.function.__module__]).values()
    return any(isinstance(value, Tool) and value.name == tool.name for value in names)


def _show(tool: Tool[..., Any], found: Sequence[tuple[str, str]]) -> None:
    definition = tool.definition
    words = [definition.category.lower(), definition.effect.lower().replace("_", " ")]
    if tool.process is not None:
        words.append("own process")
    _say(f"  {tool.name}  {', '.join(words)}")
    for kind, text in found:
        _say(f"    {kind}: {text}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _say(line: str) -> None:
    print(line, flush=True)


def _complain(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
