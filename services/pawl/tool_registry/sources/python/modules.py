"""Loads modules that contain tools. A folder becomes a package with a name that no installed module has."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.machinery
import importlib.util
import pkgutil
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from pawl.chassis.process import logs
from pawl.tools.sdk.tool import Tool

if TYPE_CHECKING:  # Tools' own processes import this module.
    from pawl.tool_registry.catalog.catalog import Catalog

_PREFIX: Final = "pawl_tools_"


def folder_package(folder: Path) -> tuple[ModuleType, BaseException | None]:
    """Return a folder's package, and the error that its `__init__.py` raised (if any).

    The package has the same name in every process. If `__init__.py` fails, the package is empty, so that the modules
    next to it can still be imported.
    """
    path = folder.resolve()
    name = _PREFIX + hashlib.sha256(str(path).encode()).hexdigest()[:16]
    known = sys.modules.get(name)
    if known is not None:
        return known, None
    init = path / "__init__.py"
    if not init.is_file():
        return _empty(name, path), None
    spec = importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(path)])
    if spec is None or spec.loader is None:
        raise TypeError("a Python file always has a loader")
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the author's code
        return _empty(name, path), error
    return package, None


def forget_folders() -> None:
    """Unload the modules of tools folders, so that they are imported again."""
    for name in [name for name in sys.modules if name.startswith(_PREFIX)]:
        del sys.modules[name]
    importlib.invalidate_caches()
    # Python checks cached bytecode by file size and time in whole seconds, which can miss quick changes.
    sys.dont_write_bytecode = True


def folder_of(module_name: str) -> Path | None:
    """Return the tools folder from which a module was loaded, or None if it was imported normally."""
    top = module_name.partition(".")[0]
    if not top.startswith(_PREFIX) or top not in sys.modules:
        return None
    return Path(sys.modules[top].__path__[0])


def _empty(name: str, path: Path) -> ModuleType:
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(path)]
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    return package


_ERROR_CHARACTERS_MAX: Final = 500
_SOURCE: Final = "module:"

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolModule:
    """A module that contains tools, or that failed to load."""

    # A human-readable name: `my_tools.money` for a file in a folder or a module in a package.
    name: str
    tools: tuple[Tool[..., Any], ...] = ()
    # File, line, type and text of the error; empty if the module was loaded.
    error: str = ""


class DeploymentTools:
    """Loads the deployment's modules into the catalog. Modules in folders are loaded again after each SIGUSR1.

    If a changed module fails to load, its earlier tools stay until it is fixed or deleted.
    """

    def __init__(self, catalog: Catalog, entries: Sequence[str]) -> None:
        self._catalog = catalog
        self._entries = entries
        self._loaded: list[ToolModule] = []
        self._is_asked = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._is_asked.set)

    async def load(self) -> None:
        found = list(load_modules(self._entries))
        names = {module.name for module in found if not module.error}
        # A package that fails to load hides its modules.
        broken = [f"{module.name}." for module in found if module.error]
        earlier = (module for module in self._loaded if module.name not in names)
        kept = [module for module in earlier if f"{module.name}.".startswith(tuple(broken))]
        self._loaded = [module for module in found if module.tools] + kept
        self._catalog.forget(_SOURCE)
        for module in self._loaded:
            await self._catalog.load(f"{_SOURCE}{module.name}", module.tools)
        _log.info("tool.modules_loaded")

    async def reload_forever(self) -> None:
        """Reload after each signal. Running calls continue with the functions that they started with."""
        while True:
            await self._is_asked.wait()
            self._is_asked.clear()
            forget_folders()
            await self.load()


def load_modules(entries: Iterable[str]) -> Iterator[ToolModule]:
    """Import `entries`, and yield every module that contains tools or fails to load.

    An entry is a module, a package (all its modules, at any depth), a file, or a folder (every module and package in
    it). An entry that contains a slash, or that names a directory that is not a package, is a path. Modules whose names
    start with an underscore or a dot are not loaded directly, but other modules may import them. Folders are imported
    under unique package names. They never shadow an installed module, and their modules use relative imports to import
    each other.

    Errors raised by a module's own code are caught, so that a broken module does not affect others. A tool that is
    found in several modules belongs to the first of them.
    """
    seen: set[int] = set()
    for entry in entries:
        has_tools = False
        for module in _modules_of(entry):
            tools = tuple(tool for tool in module.tools if id(tool) not in seen)
            seen.update(id(tool) for tool in tools)
            has_tools = has_tools or bool(module.tools or module.error)
            if module.error:
                _log.error("tool.module_broken", tool_module=module.name, error=module.error)
            if tools or module.error:
                apart = tuple(replace(tool, on_tool_loop=True) for tool in tools)
                yield ToolModule(name=module.name, tools=apart, error=module.error)
        if not has_tools:
            _log.warning("tool.module_empty", tool_module=entry)


def _modules_of(entry: str) -> Iterator[ToolModule]:
    path = Path(entry)
    if "/" not in entry and (not path.is_dir() or _is_package(entry)):
        yield from _walk(entry, entry)
    elif path.is_dir():
        package, error = folder_package(path)
        name = path.resolve().name
        yield _broken(name, error) if error else _with_tools(name, package)
        yield from _below(package, name)
    elif path.is_file() and path.suffix == ".py":
        package, _ = folder_package(path.parent)
        yield from _walk(f"{package.__name__}.{path.stem}", path.stem)
    else:
        yield ToolModule(name=entry, error=f"no such folder or Python file: {entry}")


def _is_package(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _walk(import_name: str, name: str) -> Iterator[ToolModule]:
    try:
        module = importlib.import_module(import_name)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the author's code
        yield _broken(name, error)
        return
    yield _with_tools(name, module)
    yield from _below(module, name)


def _below(module: ModuleType, name: str) -> Iterator[ToolModule]:
    for found in sorted(pkgutil.iter_modules(getattr(module, "__path__", ())), key=lambda found: found.name):
        if not found.name.startswith(("_", ".")):
            yield from _walk(f"{module.__name__}.{found.name}", f"{name}.{found.name}")


def _with_tools(name: str, module: ModuleType) -> ToolModule:
    found = {id(value): value for value in vars(module).values() if isinstance(value, Tool)}
    return ToolModule(name=name, tools=tuple(sorted(found.values(), key=lambda tool: tool.name)))


def _broken(name: str, error: BaseException) -> ToolModule:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    summary = f"{type(error).__name__}: {text}".removesuffix(": ")[:_ERROR_CHARACTERS_MAX]
    location = _location(error)
    return ToolModule(name=name, error=f"{location}: {summary}" if location else summary)


def _location(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith("<frozen importlib") and frame.filename not in _MACHINERY:
            return f"{frame.filename}:{frame.lineno}"
    return ""


_MACHINERY: Final = frozenset({__file__, importlib.__file__, sys.modules[folder_package.__module__].__file__})
