"""Applies a set of files to a store. Validates all files, shows the changes, and makes them in order."""

from __future__ import annotations

import difflib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError
from itertools import chain, count
from pathlib import Path
from typing import Final

from pawl.agent.v1 import declaration_pb2 as pb
from pawl.chassis.ids import DRAFT
from pawl.cli.contract import ask, items
from pawl.cli.declared import files, rules
from pawl.cli.declared.files import Asked
from pawl.cli.declared.kinds import DRAFTS, KINDS, Faulty, Kind, Saved, State, references, without
from pawl.cli.declared.rules import Action, Key, Owner, Step
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient
from pawl.errors import Conflict, NotFound, PawlError, PermissionDenied, Unavailable

WARNING: Final = "  warning: "
_DONE: Final = {Action.CREATE: "created", Action.UPDATE: "updated", Action.DELETE: "deleted"}


class ApplyError(CommandError):
    """Raised when files were refused or changes failed. If `may_pass` is set, a later attempt may succeed."""

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSet:
    """Files and what to do with them. `name` is the name of the set, or empty for files without pawl.yaml."""

    name: str
    asked: Mapping[Key, Asked]
    order: Sequence[Key]
    adopts: bool = False
    prunes: bool = False
    dry_run: bool = False
    drafts: bool = False

    @property
    def is_deployments(self) -> bool:
        """True if the set contains only settings of the whole deployment.

        A deployment key has no store and therefore no sets.
        """
        return not self.name and set(self.order) == {Key("settings", "deployment")}

    @property
    def kinds(self) -> Mapping[str, Kind]:
        return DRAFTS if self.drafts else KINDS


def read(
    paths: Sequence[Path], *, adopt: bool = False, prune: bool = False, dry_run: bool = False, drafts: bool = False
) -> FileSet:
    """Read a set from files and folders.

    Raises:
        CommandError: A file is invalid. The message lists every problem with its file and line.
    """
    named = {name for path in paths if (name := files.read_set(path))}
    if len(named) > 1 or (named and len(paths) > 1):
        raise CommandError(f"A folder with {files.SET_FILE} cannot be combined with other paths.")
    name = "" if drafts else next(iter(named), "")
    if (adopt or prune) and not name:
        raise CommandError(f"--adopt and --prune need a folder with {files.SET_FILE}.")
    kinds = DRAFTS if drafts else KINDS
    found, problems = files.read(paths, {kind: each.definition for kind, each in kinds.items()})
    if problems:
        raise CommandError("\n".join(problems))
    if not found and not name:
        where = ", ".join(map(str, paths))
        raise CommandError(f"No resources found in {where}. {_remedy(paths)}")
    asked = {each.key: each for each in found}
    try:
        order = rules.ordered({key: references(key, each.definition) for key, each in asked.items()})
    except CycleError as error:
        names = ", ".join(map(str, error.args[1]))
        raise CommandError(
            f"These resources refer to each other in a cycle: {names}. Remove one of the references."
        ) from None
    return FileSet(name=name, asked=asked, order=order, adopts=adopt, prunes=prune, dry_run=dry_run, drafts=drafts)


def _remedy(paths: Sequence[Path]) -> str:
    if any((path / each).is_dir() for path in paths for each in files.FOLDERS):
        return f"A folder with subfolders such as {files.FOLDERS[0]} also needs a {files.SET_FILE} with the set's name."
    return f"File names must end with {', '.join(files.ENDINGS[:-1])} or {files.ENDINGS[-1]}."


async def apply(target: AsyncClient, wanted: FileSet) -> AsyncIterator[str]:
    """Apply a set, and yield lines that describe the changes.

    Nothing changes if any file is invalid. If a change fails, earlier changes remain. Apply the set again to make the
    remaining ones.

    Raises:
        ApplyError: A file is invalid, a resource belongs to someone else, or a change failed.
    """
    owners = {} if wanted.drafts or wanted.is_deployments else await read_owners(target)
    of_set = rules.leftover(wanted.order, owners, wanted.name)
    if not wanted.order and not of_set:
        yield f"{WARNING}the set {wanted.name} has no resources. Its folders are {', '.join(files.FOLDERS)}."
    used = {key.kind for key in (*wanted.order, *of_set)}
    current = {
        Key(kind, name): state
        for kind in wanted.kinds
        if kind in used
        for name, state in (await wanted.kinds[kind].current(target)).items()
    }
    valid = await _validated(target, wanted, owners, current)
    changed = {key for key, saved in valid.items() if key in current and saved.state != current[key]}
    steps = rules.steps(wanted.order, changed, current, owners, wanted.name, prunes=wanted.prunes)
    for index, step in enumerate(steps):
        saved = valid.get(step.key)
        if not wanted.dry_run:
            try:
                saved = await _take(target, wanted, step, exists=step.key in current) or saved
            except PawlError as error:
                left = ", ".join(str(each.key) for each in steps[index:] if each.action is not Action.KEEP)
                problem = f"{step.key.kind} {step.key.name!r} failed: {_text(error)}"
                raise ApplyError(
                    f"{problem}\nNot applied: {left or step.key}. Run the command again.", may_pass=_may_pass(error)
                ) from error
        for line in _lines(step, saved, current.get(step.key), DRAFT if wanted.drafts else ""):
            yield line
    if of_set and not wanted.prunes:
        yield f"{WARNING}no file declares {', '.join(map(str, of_set))}; use --prune to delete them"


async def read_owners(target: AsyncClient) -> Mapping[Key, Owner]:
    found = await items(target, pb.ListDeclarationsRequest())
    return {Key(each.kind, each.name): Owner(each.set, each.version) for each in found}


async def _validated(
    target: AsyncClient, wanted: FileSet, owners: Mapping[Key, Owner], current: Mapping[Key, State]
) -> Mapping[Key, Saved]:
    """Return each resource as the servers would save it.

    Raises:
        ApplyError: A resource is invalid or belongs to someone else.
    """
    valid: dict[Key, Saved] = {}
    problems: dict[str, bool] = {}
    # Drafts can delegate only to the store's agents.
    later = set() if wanted.drafts else set(wanted.order) - set(current)
    for key in wanted.order:
        asked = wanted.asked[key]
        exists = key in current
        refused = rules.refusal(key, owners.get(key), wanted.name, exists=exists, adopts=wanted.adopts)
        if refused:
            problems[asked.problem(refused)] = False
            continue
        needs = references(key, asked.definition) & later - {key}
        definition = without(key, asked.definition, needs)
        try:
            new_before = sum(each.kind == key.kind and each not in current for each in valid)
            saved = await wanted.kinds[key.kind].save(
                target, definition, exists=exists, validate_only=True, new_before=new_before
            )
        except PawlError as error:
            problems[asked.problem(_text(error), error.metadata.get("field", ""))] = _may_pass(error)
        except Faulty as error:
            remaining = error.without(definition, needs)
            problems |= dict.fromkeys(asked.faults(remaining), False)
            if not remaining:
                valid[key] = Saved(State(definition, is_partial=True))
        else:
            if needs:  # The missing resources may change the result, so save this one again after they exist.
                comments = current[key].comments if exists else ()
                saved = Saved(State(asked.definition, comments, is_partial=True), saved.outcome)
            valid[key] = saved
            if key.kind == "source" and saved.state != current.get(key):
                later.add(key)  # The resource may add tools.
    if problems:
        raise ApplyError("\n".join(problems), may_pass=all(problems.values()))
    return valid


async def _take(target: AsyncClient, wanted: FileSet, step: Step, *, exists: bool) -> Saved | None:
    """Write the declaration first, then the resource. After a crash in between, every resource still has its owner."""
    version, kind = step.version, wanted.kinds[step.key.kind]
    declaration = pb.Declaration(kind=step.key.kind, name=step.key.name, set=wanted.name, version=version)
    if step.claims:
        put = await ask(target, pb.PutDeclarationRequest(declaration=declaration))
        declaration.version = put.declaration.version
    match step.action:
        case Action.CREATE | Action.UPDATE:
            asked = wanted.asked[step.key].definition
            return await kind.save(target, asked, exists=exists, validate_only=False)
        case Action.DELETE:
            if exists:
                await kind.delete(target, step.key.name)
            await ask(target, pb.DeleteDeclarationRequest(declaration=declaration))
        case Action.KEEP:
            pass
    return None


def _lines(step: Step, saved: Saved | None, before: State | None, prefix: str) -> list[str]:
    label = f"{prefix}{step.key}"
    if step.action is Action.KEEP or saved is None:
        outcome = ("adopted" if step.claims else "unchanged") if saved else _DONE[step.action]
        removed = [] if saved or before is None else _yaml(step.key, before)
        return [f"{label}: {outcome}", *(f"  -{line}" for line in removed), *_notes(saved)]
    old = _yaml(step.key, before) if before is not None else []
    difference = difflib.unified_diff(old, _yaml(step.key, saved.state), n=1, lineterm="")
    changes = [f"  {line}" for line in difference if not line.startswith(("---", "+++", "@@"))]
    secret = [f"  secret, shown only now: {saved.secret}"] if saved.secret else []
    return [f"{label}: {saved.outcome or _DONE[step.action]}", *changes, *_notes(saved), *secret]


def _notes(saved: Saved | None) -> list[str]:
    return [f"{WARNING}{note}" for note in saved.notes] if saved else []


def _yaml(key: Key, state: State) -> list[str]:
    return files.to_yaml(key.kind, state.definition, state.comments).splitlines()


def _text(error: PawlError) -> str:
    return f"{error.message} ({error.reason})"


def _may_pass(error: PawlError) -> bool:
    return isinstance(error, NotFound | Unavailable | Conflict)


async def export(target: AsyncClient, folder: Path, name: str) -> AsyncIterator[str]:
    """Create a set with a file for each resource that the caller can see. Yield a line about each file."""
    file = _write(folder / files.SET_FILE, f"name: {name}\n")
    yield f"set {name}: {file}"
    for kind, each in KINDS.items():
        try:
            found = await each.current(target)
        except PermissionDenied as error:
            yield f"{WARNING}no {rules.folder(kind)} are exported: {_text(error)}"
            continue
        for resource, state in sorted(found.items()):
            secrets = files.without_secrets(resource, state.definition)
            stem = re.sub(r"[^\w.-]", "_", resource)[:60]
            file = _write(folder / rules.folder(kind) / f"{stem}.yaml", files.to_yaml(kind, state.definition))
            yield f"{kind} {resource}: {file}"
            for secret in secrets:
                yield f"{WARNING}the value of its secret {secret} is left out; add it to the deployment's secrets"


def _write(file: Path, text: str) -> Path:
    """Write a new file. If its name is taken, add a number to the name."""
    named = (file.with_stem(f"{file.stem}-{number}") for number in count(2))
    new = next(each for each in chain([file], named) if not each.exists())
    new.parent.mkdir(parents=True, exist_ok=True)
    new.write_text(text, encoding="utf-8")
    return new
