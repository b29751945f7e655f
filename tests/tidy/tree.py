"""The files to which the rules of tests/tidy apply."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAWL = ROOT / "services/pawl"
CLIENT = ROOT / "services/pawl-client/pawl"
GENERATED = (
    "gen/pawl",
    "docs/images",
    "requirements",
    "services/pawl/gateway/static",
    "web/client/gen",
    "web/package-lock.json",
)
HIDDEN_BUT_OURS = {".ci", ".editorconfig", ".env.example", ".dockerignore", ".gitignore"}


def files(*suffixes: str) -> Iterator[Path]:
    return (path for path in _walk(ROOT) if not suffixes or path.suffix in suffixes)


def python(*folders: str) -> Iterator[Path]:
    return (path for folder in folders for path in _walk(ROOT / folder) if path.suffix == ".py")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        is_hidden = path.name.startswith(".") and path.name not in HIDDEN_BUT_OURS
        is_built = path.name in {"__pycache__", "build", "dist", "node_modules"} or path.suffix == ".egg-info"
        if is_hidden or is_built or name(path).startswith(GENERATED):
            continue
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path
