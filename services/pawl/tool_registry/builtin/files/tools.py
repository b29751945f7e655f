"""Tools for the files in the store's own folder."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec

from pawl.chassis.ids import StoreId
from pawl.tool_registry.audit.rules import sha256_hex
from pawl.tool_registry.builtin.files.folders import FileFolders, FileView, Plan
from pawl.tool_registry.builtin.files.processing import Processing, keeps_staged
from pawl.tool_registry.builtin.files.rules import PATH_CHARACTERS_MAX, Entry, FileChange, Planned
from pawl.tool_registry.builtin.files.tally import Query
from pawl.tool_registry.rules.slices import BYTES_DEFAULT, BYTES_MAX, slice_of
from pawl.tools.sdk.context import ToolContext, ToolError
from pawl.tools.sdk.inverse import Inverse, Reversible
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass

# Maximum size of an undo call's JSON arguments.
UNDO_BYTES_MAX: Final = 64 * 1024
LISTED_MAX: Final = 500

_EXISTS: Final = "{!r} already exists; choose another output_path"
_PATH: Final = "relative to the store's folder: notes/plan.md"


def _acts(*acts_as: str) -> dict[str, Any]:
    return {"x-pawl-acts-as": list(acts_as)} if acts_as else {}


def _path(*acts_as: str) -> msgspec.Meta:
    """Return the metadata for a path argument. Rules for the tool arguments in `acts_as` also apply to the path."""
    schema = {"format": "path"} | _acts(*acts_as)
    return msgspec.Meta(min_length=1, max_length=PATH_CHARACTERS_MAX, extra_json_schema=schema)


Path = Annotated[str, _path(), _PATH]
Changed = Annotated[str, _path("write_file.path"), _PATH]
Left = Annotated[str, _path("read_file.path/*", "write_file.path/*", "delete_file.path/*"), _PATH]
Reached = Annotated[str, _path("write_file.path/*"), _PATH]
Content = Annotated[str, msgspec.Meta(max_length=200_000)]
Digest = Annotated[
    Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None, "only change the file if this is its SHA-256"
]


Columns = Annotated[list[Annotated[str, msgspec.Meta(min_length=1, max_length=200)]], msgspec.Meta(max_length=50)]


def file_tools(store: FileFolders) -> list[Tool[..., Any]]:
    return [*_reading(store), *_writing(store), *_arranging(store), _processing(store), _front()]


def _reading(store: FileFolders) -> list[Tool[..., Any]]:
    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    def list_files(
        context: ToolContext,
        path: Annotated[
            str, msgspec.Meta(extra_json_schema={"format": "path"}), "a folder; empty for the store's folder"
        ] = "",
        after: Annotated[str, "list only names after this one"] = "",
    ) -> dict[str, Any]:
        """List the files and folders of a folder, by name."""
        found = [entry for entry in store.entries(StoreId(context.store_id), path) if entry.name > after]
        listed = {"path": path, "entries": [_shown(entry) for entry in found[:LISTED_MAX]]}
        return listed | ({"next_after": found[LISTED_MAX - 1].name} if len(found) > LISTED_MAX else {})

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    def read_file(
        context: ToolContext,
        path: Path,
        offset: Annotated[int, msgspec.Meta(ge=0), "bytes to skip"] = 0,
        length: Annotated[int, msgspec.Meta(ge=1, le=BYTES_MAX), "bytes to read"] = BYTES_DEFAULT,
    ) -> dict[str, Any]:
        """Read a text file, or a part of it."""
        content = store.read(StoreId(context.store_id), path)
        _text(content, path)
        return {"path": path, "sha256": sha256_hex(content)} | slice_of(content, offset, length)

    return [list_files, read_file]


def _writing(store: FileFolders) -> list[Tool[..., Any]]:
    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, resource_keys=["file:{path}"])
    def write_file(
        context: ToolContext,
        path: Path,
        content: Content,
        *,
        overwrite: Annotated[bool, "true to replace an existing file"] = False,
        expected_sha256: Digest = None,
    ) -> Any:
        """Write a text file; parent folders are created."""
        return _change(
            store, context, lambda view: plan_write(view, path, content, overwrite=overwrite, expected=expected_sha256)
        )

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, resource_keys=["file:{path}"])
    def append_file(context: ToolContext, path: Changed, content: Content) -> Any:
        """Add text to the end of a file; creates the file if it does not exist."""
        return _change(store, context, lambda view: plan_append(view, path, content))

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, resource_keys=["file:{path}"])
    def edit_file(
        context: ToolContext,
        path: Changed,
        old_text: Annotated[str, msgspec.Meta(min_length=1), "the exact text, which must occur once in the file"],
        new_text: Content,
    ) -> Any:
        """Replace a part of a text file."""
        return _change(store, context, lambda view: plan_edit(view, path, old_text, new_text))

    return [write_file, append_file, edit_file]


def _arranging(store: FileFolders) -> list[Tool[..., Any]]:
    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, resource_keys=["file:{path}", "file:{new_path}"])
    def move_file(context: ToolContext, path: Left, new_path: Reached) -> Any:
        """Move or rename a file or folder; new_path must not exist."""
        return _change(store, context, lambda view: plan_move(view, path, new_path))

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, resource_keys=["file:{path}"])
    def make_folder(context: ToolContext, path: Path) -> Any:
        """Create a folder."""
        return _change(store, context, lambda view: plan_folder(view, path))

    @tool(
        category=Category.DESTRUCTIVE,
        effect=EffectClass.IDEMPOTENT,
        resource_keys=["file:{path}"],
        preview=lambda path, **_: f"Delete the file or empty folder {path!r}",
    )
    def delete_file(context: ToolContext, path: Path, expected_sha256: Digest = None) -> Any:
        """Delete a file or an empty folder."""
        return _change(store, context, lambda view: plan_delete(view, path, expected_sha256))

    return [move_file, make_folder, delete_file]


def _processing(store: FileFolders) -> Tool[..., Any]:
    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, timeout_seconds=100, async_timeout_seconds=3600)
    def process_file(
        context: ToolContext,
        path: Annotated[str, _path("read_file.path"), _PATH],
        *,
        pattern: Annotated[
            str, msgspec.Meta(max_length=1000), "count only lines or rows that contain this regular expression"
        ] = "",
        pattern_column: Annotated[str, "CSV column to which pattern applies; empty for the whole row"] = "",
        columns: Annotated[Columns, "CSV columns to output; empty for all"] = [],  # noqa: B006
        group_by: Annotated[Columns, "CSV columns; counts the rows of each combination of values"] = [],  # noqa: B006
        measures: Annotated[
            list[str], msgspec.Meta(max_length=4), "CSV columns with numbers: sum, mean, min and max of each group"
        ] = [],  # noqa: B006
        output_path: Annotated[
            str,
            msgspec.Meta(
                max_length=PATH_CHARACTERS_MAX, extra_json_schema={"format": "path"} | _acts("write_file.path")
            ),
            "a new file for all matching lines, rows or groups; empty for a summary only",
        ] = "",
    ) -> Any:
        """Count, filter or group the lines of a text file, or the rows of a CSV file with a header, of up to 1 GiB.

        Run it in the background if the file is over 100 MB.
        """
        query = Query(
            pattern=pattern, pattern_column=pattern_column, columns=columns, group_by=group_by, measures=measures
        )
        return _process(store, context, query, path, output_path)

    return process_file


def _front() -> Tool[..., Any]:
    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, background=False)
    def file_operations(action: str, path: str = "") -> Any:  # noqa: ARG001
        """Work with the store's files. Each action takes the parameters of its tool, such as write_file for write."""
        raise ToolError("agent-loop replaces calls of file_operations; call the file tools instead")

    return file_operations


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    value: dict[str, Any]
    inverse: Inverse | None


def _change(store: FileFolders, context: ToolContext, plan: Plan) -> Any:
    return _returned(store.change(StoreId(context.store_id), context.idempotency_key, plan, context.wait_cancelled))


def _process(store: FileFolders, context: ToolContext, query: Query, path: str, output_path: str) -> Any:
    store_id, key = StoreId(context.store_id), context.idempotency_key
    if output_path and (earlier := store.outcome(store_id, key, context.wait_cancelled)) is not None:
        return _returned(earlier)
    with ExitStack() as stack:
        source = stack.enter_context(store.opened(store_id, path))
        staged = None
        if output_path or query.is_grouped:
            if output_path and store.exists(store_id, output_path):
                raise ToolError(_EXISTS.format(output_path))
            opened = store.staged(store_id, key, output_path or path, context.wait_cancelled, resumes=True)
            staged = stack.enter_context(opened)
        try:
            value = {"path": path} | Processing(source, query, context, staged, has_output=bool(output_path)).run()
            if staged is None or not output_path:
                return value
            output = FileChange(kind="put", path=output_path, staged=staged.name, staged_bytes=staged.size)
            value |= {"output_path": output_path, "output_bytes": staged.size, "sha256": staged.sha256()}
            return _change(store, context, lambda view: plan_output(view, output, value))
        except BaseException as error:
            if staged is not None:
                staged.is_kept = keeps_staged(error, context)
            raise


def _returned(stored: bytes) -> Any:
    outcome = msgspec.json.decode(stored, type=_Outcome)
    return outcome.value if outcome.inverse is None else Reversible(value=outcome.value, inverse=outcome.inverse)


def _planned(change: FileChange | None, value: dict[str, Any], inverse: Inverse | None) -> Planned:
    return Planned(change=change, outcome=msgspec.json.encode(_Outcome(value=value, inverse=inverse)))


def plan_write(view: FileView, path: str, content: str, *, overwrite: bool, expected: str | None) -> Planned:
    new, old = content.encode(), view.read(path)
    _check_expected(path, old, expected)
    value = {"path": path, "bytes": len(new), "sha256": sha256_hex(new), "created": old is None}
    if old is None:
        return _planned(FileChange(kind="put", path=path, content=new), value, _delete(path, sha256_hex(new)))
    if old == new:
        return _planned(None, value, None)
    if not overwrite:
        raise ToolError(f"the file {path!r} already exists; set overwrite to replace it, or use edit_file")
    inverse = _restore(path, old, new)
    if inverse is None:
        raise ToolError(
            f"{path!r} was not overwritten, because that could not be undone: it is not text, or larger than"
            f" {UNDO_BYTES_MAX} bytes. Use edit_file, or delete_file first"
        )
    return _planned(FileChange(kind="put", path=path, content=new), value, inverse)


def plan_output(view: FileView, output: FileChange, value: dict[str, Any]) -> Planned:
    if view.entry(output.path) is not None:
        raise ToolError(_EXISTS.format(output.path))
    return _planned(output, value, _delete(output.path, value["sha256"]))


def plan_append(view: FileView, path: str, content: str) -> Planned:
    old = view.read(path)
    new = (_text(old or b"", path) + content).encode()
    value = {"path": path, "bytes": len(new), "sha256": sha256_hex(new), "created": old is None}
    inverse = _delete(path, sha256_hex(new)) if old is None else _restore(path, old, new)
    return _planned(FileChange(kind="put", path=path, content=new), value, inverse)


def plan_edit(view: FileView, path: str, old_text: str, new_text: str) -> Planned:
    old = view.read(path)
    if old is None:
        raise ToolError(f"the file {path!r} does not exist")
    text = _text(old, path)
    count = _occurrences(text, old_text)
    if count != 1:
        problem = (
            "occurs more than once in {}; include more of the surrounding text" if count else "does not occur in {}"
        )
        raise ToolError(f"the old text {problem.format(repr(path))}; nothing was changed")
    changed = text.replace(old_text, new_text)
    new = changed.encode()
    value = {"path": path, "bytes": len(new), "sha256": sha256_hex(new)}
    if new == old:
        return _planned(None, value, None)
    inverse = None
    if new_text and _occurrences(changed, new_text) == 1:
        back = {"path": path, "old_text": new_text, "new_text": old_text}
        inverse = _inverse("edit_file", back, f"Undo the edit of {path!r}")
    inverse = inverse or _restore(path, old, new)
    return _planned(FileChange(kind="put", path=path, content=new), value, inverse)


def plan_move(view: FileView, path: str, new_path: str) -> Planned:
    found = view.entry(path)
    if found is None:
        raise ToolError(f"{path!r} does not exist")
    if found.kind == "other":
        raise ToolError(f"{path!r} is neither a file nor a folder")
    if view.entry(new_path) is not None:
        raise ToolError(f"{new_path!r} already exists")
    if new_path.startswith(f"{path}/"):
        raise ToolError("a folder cannot be moved into itself")
    back = {"path": new_path, "new_path": path}
    inverse = Inverse(tool_name="move_file", arguments=back, summary=f"Move {new_path!r} back to {path!r}")
    return _planned(
        FileChange(kind="move", path=path, new_path=new_path), {"path": path, "new_path": new_path}, inverse
    )


def plan_folder(view: FileView, path: str) -> Planned:
    found = view.entry(path)
    if found is not None and found.kind != "folder":
        raise ToolError(f"{path!r} is a file")
    value = {"path": path, "created": found is None}
    if found is not None:
        return _planned(None, value, None)
    inverse = Inverse(tool_name="delete_file", arguments={"path": path}, summary=f"Delete the folder {path!r}")
    return _planned(FileChange(kind="make_folder", path=path), value, inverse)


def plan_delete(view: FileView, path: str, expected: str | None) -> Planned:
    found = view.entry(path)
    if found is None:
        raise ToolError(f"{path!r} does not exist")
    if found.kind == "other":
        raise ToolError(f"{path!r} is neither a file nor a folder")
    if found.kind == "folder":
        inverse = Inverse(
            tool_name="make_folder", arguments={"path": path}, summary=f"Create the folder {path!r} again"
        )
        return _planned(FileChange(kind="remove", path=path), {"path": path, "deleted": "folder"}, inverse)
    if expected is not None and view.sha256(path) != expected:
        raise ToolError(f"{path!r} has changed; nothing was done")
    content = view.read(path) if found.size_bytes <= UNDO_BYTES_MAX else None
    text = _text_or_none(content) if content is not None else None
    again = None if text is None else _inverse("write_file", {"path": path, "content": text}, f"Write {path!r} again")
    return _planned(FileChange(kind="remove", path=path), {"path": path, "deleted": "file"}, again)


def _check_expected(path: str, content: bytes | None, expected: str | None) -> None:
    if expected is not None and (content is None or sha256_hex(content) != expected):
        raise ToolError(f"{path!r} has changed; nothing was done")


def _delete(path: str, sha256: str) -> Inverse:
    arguments = {"path": path, "expected_sha256": sha256}
    return Inverse(tool_name="delete_file", arguments=arguments, summary=f"Delete the file {path!r}")


def _restore(path: str, old: bytes, new: bytes) -> Inverse | None:
    text = _text_or_none(old)
    if text is None or old == new:
        return None
    arguments = {"path": path, "content": text, "overwrite": True, "expected_sha256": sha256_hex(new)}
    return _inverse("write_file", arguments, f"Restore the old text of {path!r}")


def _inverse(tool_name: str, arguments: dict[str, Any], summary: str) -> Inverse | None:
    if len(msgspec.json.encode(arguments)) > UNDO_BYTES_MAX:
        return None
    return Inverse(tool_name=tool_name, arguments=arguments, summary=summary)


def _occurrences(text: str, piece: str) -> int:
    """Count the occurrences of `piece`, including overlapping ones. Stop at 2."""
    first = text.find(piece)
    return 0 if first < 0 else 1 + (text.find(piece, first + 1) >= 0)


def _text_or_none(content: bytes) -> str | None:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _text(content: bytes, path: str) -> str:
    text = _text_or_none(content)
    if text is None:
        raise ToolError(f"{path!r} is not UTF-8 text")
    return text


def _shown(entry: Entry) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": entry.name, "kind": entry.kind}
    if entry.kind == "file":
        shown["bytes"] = entry.size_bytes
    return shown | {"modified": datetime.fromtimestamp(entry.modified, UTC).isoformat(timespec="seconds")}
