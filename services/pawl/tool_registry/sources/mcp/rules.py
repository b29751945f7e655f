"""The deployment's rules for which programs stores may start."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Final

import msgspec

from pawl.chassis.ids import StoreId

ANY_ARGUMENTS: Final = "*"
EVERY_STORE: Final = "*"


class ProgramRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Arguments are compared literally. At the end of a rule, `*` matches any further arguments.
    command: Sequence[str]
    # Names of environment variables.
    variables: Collection[str] = []
    # Folders that the program may access, including their contents.
    paths: Sequence[str] = []


def check_rule(rule: ProgramRule) -> None:
    """Validate one of the deployment's rules.

    Raises:
        ValueError: The command does not start with an absolute path, or one of `paths` is not absolute or contains
            `..`.
    """
    if not rule.command or not PurePosixPath(rule.command[0]).is_absolute():
        raise ValueError("a command must start with the absolute path of a program")
    if not all(PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts for path in rule.paths):
        raise ValueError("paths must be absolute, without ..")


def refusal_reason(rules: Mapping[str, Sequence[ProgramRule]], store_id: StoreId, requested: ProgramRule) -> str:
    """Return why a store may not start a program, or an empty string if it may.

    The rules for `*` apply to stores that have no rules of their own.
    """
    own = rules.get(store_id, rules.get(EVERY_STORE, ()))
    fitting = [rule for rule in own if _matches(rule.command, requested.command)]
    if not fitting:
        return "the deployment does not allow this command"
    for rule in fitting:
        unlisted = sorted(set(requested.variables) - set(rule.variables))
        outside = [path for path in requested.paths if not any(_is_in(path, root) for root in rule.paths)]
        if not unlisted and not outside:
            return ""
    if unlisted:
        return f"the deployment does not allow the variable {unlisted[0]} for this command"
    return f"the deployment does not allow the path {outside[0]!r} for this command"


def _matches(allowed: Sequence[str], command: Sequence[str]) -> bool:
    if allowed[-1] == ANY_ARGUMENTS:
        return list(command[: len(allowed) - 1]) == list(allowed[:-1])
    return list(command) == list(allowed)


def _is_in(path: str, root: str) -> bool:
    return PurePosixPath(path).is_relative_to(root)
