"""Write the Python stubs of every .proto file into a directory.

Run by `make proto` and `make proto-check` with the pinned toolchain of
requirements/proto.txt. The output is deterministic and replaces `pawl` in the
target.

`pawl.comments` has the first sentence of the comment on each request field, for
the help of the command line.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

PROTO_DIR = Path(__file__).parent
_FIELD = [4, 2]
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
        write_comments(target, sources)
        make_packages(target)
    return int(status)


def write_comments(target: Path, sources: list[str]) -> None:
    """Write the first sentence about each field that a request can have, by the full name of the field."""
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "descriptors"
        protoc.main(
            [
                "protoc",
                f"--proto_path={PROTO_DIR}",
                f"--proto_path={files('grpc_tools') / '_proto'}",
                "--include_source_info",
                f"--descriptor_set_out={described}",
                *sources,
            ]
        )
        protos = FileDescriptorSet.FromString(described.read_bytes()).file
    messages = {f".{proto.package}.{message.name}": message for proto in protos for message in proto.message_type}
    public = [service for proto in protos if "job/" not in proto.name for service in proto.service]
    wanted = within(messages, [method.input_type for service in public for method in service.method])
    comments = {
        name: text for proto in protos for name, text in field_comments(proto) if name.rpartition(".")[0] in wanted
    }
    for name, text in comments.items():
        if see := re.fullmatch(r"See (\w+)\.", text):
            message, _, field = name.rpartition(".")
            comments[name] = comments[f"{message.rpartition('.')[0]}.{see[1]}.{field}"]
    lines = "".join(f"    {name!r}: {text!r},\n" for name, text in sorted(comments.items()))
    folder_of_comments = target / "pawl" / "comments"
    folder_of_comments.mkdir(parents=True)
    (folder_of_comments / "fields.py").write_text(
        BANNER.format(source="pawl") + f"\nCOMMENTS: dict[str, str] = {{\n{lines}}}\n"
    )


def within(messages: dict[str, DescriptorProto], names: list[str]) -> set[str]:
    """Return the full names of these messages, and of those that they can hold."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name in messages and name[1:] not in found:
            found.add(name[1:])
            fields = messages[name].field
            names += [field.type_name for field in fields if field.type == FieldDescriptorProto.TYPE_MESSAGE]
    return found


def field_comments(proto: FileDescriptorProto) -> Iterator[tuple[str, str]]:
    """Yield the full name of each field of a file, and the first sentence of its comment."""
    for location in proto.source_code_info.location:
        # The path of a field is: messages of a file, which one, its fields, which one.
        if location.path[::2] == _FIELD and len(location.path) == 2 * len(_FIELD) and location.leading_comments:
            message = proto.message_type[location.path[1]]
            field = message.field[location.path[3]].name
            if field in {"request_id", "page_size", "page_token"}:
                continue
            text = " ".join(location.leading_comments.partition("\n\n")[0].split())
            sentence = re.split(r"(?<=\.) (?=[A-Z])", text)[0]
            yield f"{proto.package}.{message.name}.{field}", sentence


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
