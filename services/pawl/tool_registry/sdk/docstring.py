"""The descriptions of a function and of its parameters, from its docstring."""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

_SECTION: Final = re.compile(r"(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?):")
_PARAMETER: Final = re.compile(r"(\s+)\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)")
_SPHINX: Final = re.compile(r":(param|return|returns|rtype|type|raises)(?:\s+[^:]*?(\w+))?:\s*(.*)")


def read_docstring(function: Any) -> tuple[str, dict[str, str]]:
    """Return the description and the description of each parameter.

    Reads Google style (`Args:`) and Sphinx style (`:param name:`). What comes
    before the first section is the description. docstring_parser would give up all
    parameters for one line of a section that has no colon, as under `Raises:`.
    """
    description: list[str] = []
    parameters: dict[str, list[str]] = {}
    section = ""
    target: list[str] | None = description
    indent = 0
    for line in (inspect.getdoc(function) or "").splitlines():
        heading = _SECTION.fullmatch(line.strip()) if line == line.lstrip() else None
        sphinx = _SPHINX.fullmatch(line.strip())
        if heading:
            section, target, indent = heading[1], None, 0
        elif sphinx:
            section = "sphinx"
            target = parameters.setdefault(sphinx[2], [sphinx[3]]) if sphinx[1] == "param" and sphinx[2] else None
        elif section in ("Args", "Arguments", "Parameters"):
            entry = _PARAMETER.fullmatch(line)
            if entry and (not indent or len(entry[1]) <= indent):
                indent = len(entry[1])
                target = parameters.setdefault(entry[2], [entry[3]])
            elif target is not None:
                target.append(line.strip())
        elif target is not None and (not section or section == "sphinx"):
            target.append(line if target is description else line.strip())
    return "\n".join(description).strip(), {name: " ".join(filter(None, lines)) for name, lines in parameters.items()}
