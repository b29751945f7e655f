"""The deployment's rules on the programs that stores may start."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

import msgspec

from pawl.chassis.ids import StoreId

ANY_ARGUMENTS: Final = "*"
EVERY_STORE: Final = "*"


class ProgramRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program that may be started, or that a source asks for."""

    command: Sequence[str]
    """Word for word; in a rule a last `*` stands for any further arguments."""
    variables: Collection[str] = []
    """Names of environment variables."""
    paths: Sequence[str] = []
    """Folders that the program reaches, with everything in them."""


def check_rule(rule: ProgramRule) -> None:
    """Check a rule of the deployment.

    Raises:
        ValueError: it would not mean what it says.
    """
    if not rule.command or not PurePosixPath(rule.command[0]).is_absolute():
        raise ValueError("a command begins with the absolute path of a program")
    if not all(PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts for path in rule.paths):
        raise ValueError("paths are absolute, without ..")


def objection(rules: Mapping[str, Sequence[ProgramRule]], store_id: StoreId, wanted: ProgramRule) -> str:
    """Return why a store may not start that program, or an empty text.

    The rules of `*` are for stores without rules of their own.
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
