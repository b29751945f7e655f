"""Write the Python stubs of every .proto file into a directory.

Run by `make proto` and `make proto-check` with the pinned toolchain of
requirements/proto.txt. The same protos give the same bytes, and whatever the
target held before and no longer has a source is gone afterwards.
"""

from __future__ import annotations

import shutil
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTO_DIR = Path(__file__).parent
BANNER = '"""Generated from proto/{source} by `make proto`. Do not edit."""\n'


def main(target: Path) -> int:
    """Replace `target`/pawl with freshly generated stubs; 0, or protoc's exit status."""
    sources = sorted(path.relative_to(PROTO_DIR).as_posix() for path in PROTO_DIR.rglob("*.proto"))
    shutil.rmtree(target / "pawl", ignore_errors=True)
    target.mkdir(parents=True, exist_ok=True)
    plugins = Path(sys.executable).parent
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTO_DIR}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--python_out={target}",
            f"--grpc_python_out={target}",
            f"--mypy_out=quiet:{target}",
            f"--mypy_grpc_out=quiet:{target}",
            *sources,
        ]
    )
    if status == 0:
        make_packages(target)
    return int(status)


def make_packages(target: Path) -> None:
    """Make every generated folder a typed package, but for `pawl`, which other distributions add to (PEP 420)."""
    for folder in sorted({path.parent for path in (target / "pawl").rglob("*.py")}):
        for package in (folder, *folder.parents):
            if package == target / "pawl":
                break
            source = package.relative_to(target).as_posix()
            (package / "__init__.py").write_text(BANNER.format(source=source))
    for package in (target / "pawl").iterdir():
        (package / "py.typed").touch()
    # protoc writes an empty service module for a file without services.
    for module in (target / "pawl").rglob("*_pb2_grpc.py"):
        if "class " not in module.read_text():
            module.unlink()
            module.with_suffix(".pyi").unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
