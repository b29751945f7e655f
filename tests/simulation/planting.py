"""Replaces text of modules while they are imported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

from tests.simulation.planted import Mutant


class _Planter(SourceFileLoader):
    def __init__(self, spec: ModuleSpec, edits: Sequence[tuple[str, str]]) -> None:
        super().__init__(spec.name, str(spec.origin))
        self._edits = edits

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        for text, instead in self._edits:
            if text not in source:
                raise SystemExit(f"{fullname} has no {text!r} : update the mutant")
            source = source.replace(text, instead, 1)
        return compile(source, self.path, "exec")


class Finder(MetaPathFinder):
    """Import finder that plants a mutant; insert it before the other finders."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        edits = [(text, instead) for module, text, instead in self._mutant.edits if module == fullname]
        spec = PathFinder.find_spec(fullname, path, target) if edits else None
        if spec is not None:
            spec.loader = _Planter(spec, edits)
        return spec
