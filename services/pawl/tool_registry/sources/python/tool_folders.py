"""Folders of tools as packages, under names that no installed module has."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Final

_PREFIX: Final = "pawl_tools_"


def folder_package(folder: Path) -> tuple[ModuleType, BaseException | None]:
    """Return the package that a folder is imported as, and what its own `__init__.py` raised, if it did.

    The same for the same folder, in every process. Where `__init__.py` fails, the
    package is there without it, so that the modules beside it can still be
    imported.
    """
    place = folder.resolve()
    name = _PREFIX + hashlib.sha256(str(place).encode()).hexdigest()[:16]
    known = sys.modules.get(name)
    if known is not None:
        return known, None
    init = place / "__init__.py"
    if not init.is_file():
        return _empty(name, place), None
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(place)])
    if spec is None or spec.loader is None:
        raise TypeError("a Python file always has a loader")
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the author's code
        return _empty(name, place), error
    return package, None


def folder_of(module_name: str) -> Path | None:
    """Return the folder whose package a module belongs to; None for a module that is imported as usual."""
    top = module_name.partition(".")[0]
    if not top.startswith(_PREFIX) or top not in sys.modules:
        return None
    return Path(sys.modules[top].__path__[0])


def _empty(name: str, place: Path) -> ModuleType:
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(place)]
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    return package
