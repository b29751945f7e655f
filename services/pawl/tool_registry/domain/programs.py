"""The deployment's rules on the programs that stores may have started for them, and with what."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

import msgspec

from pawl.chassis.ids import StoreId

ANY_ARGUMENTS: Final = "*"
EVERY_STORE: Final = "*"


class ProgramRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One program that may be started: with which arguments, variables and folders."""

    command: Sequence[str]
    """Word for word; a last `*` stands for any further arguments."""
    variables: Collection[str] = []
    """Names of variables that a source may set."""
    paths: Sequence[str] = []
    """Folders that a source may grant, with all that is in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedProgram:
    """The program that a source asks for."""

    command: Sequence[str]
    variables: Collection[str]
    paths: Sequence[str]


def check_rule(rule: ProgramRule) -> None:
    """Refuse a rule that would not mean what it says.

    Raises:
        ValueError: with a sentence about it.
    """
    if not rule.command or not PurePosixPath(rule.command[0]).is_absolute():
        raise ValueError("a command begins with the absolute path of a program")
    if not all(PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts for path in rule.paths):
        raise ValueError("paths are absolute, without ..")


def objection(rules: Mapping[str, Sequence[ProgramRule]], store_id: StoreId, wanted: WantedProgram) -> str:
    """Return why a store may not have that program started, or an empty text.

    The rules of `*` are for stores without any of their own.
    """
    own = rules.get(store_id, rules.get(EVERY_STORE, ()))
    fitting = [rule for rule in own if _matches(rule.command, wanted.command)]
    if not fitting:
        return "the deployment does not allow this command"
    for rule in fitting:
        strange = sorted(set(wanted.variables) - set(rule.variables))
        outside = [path for path in wanted.paths if not any(_is_in(path, root) for root in rule.paths)]
        if not strange and not outside:
            return ""
    if strange:
        return f"the deployment does not allow it the variable {strange[0]}"
    return f"the deployment does not allow it {outside[0]!r}"


def _matches(allowed: Sequence[str], command: Sequence[str]) -> bool:
    if allowed[-1] == ANY_ARGUMENTS:
        return list(command[: len(allowed) - 1]) == list(allowed[:-1])
    return list(command) == list(allowed)


def _is_in(path: str, root: str) -> bool:
    return PurePosixPath(path).is_relative_to(root)
