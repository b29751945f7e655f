"""File tools on a real file system: no escape, no loss, no repeated effects (TOOL-7, I13, C4)."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import threading
import time
import unicodedata
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pawl.chassis.ids import StoreId
from pawl.tool_registry.builtin.files.folders import RECORD_SECONDS, FileFolders
from pawl.tool_registry.builtin.files.rules import FileLimits, path_problem
from pawl.tool_registry.builtin.files.tools import UNDO_BYTES_MAX, file_tools
from pawl.tools import Reversible, ToolCancelled, ToolContext, ToolError
from tests.tables import for_each

KEYS = (f"call_{number}" for number in itertools.count())
SECRET = "a private file of the machine"


class Desk:
    def __init__(self, folder: Path, *, store: str = "acme", **limits: int) -> None:
        limits = {"file_bytes_max": 1 << 20, "store_bytes_max": 1 << 24} | limits
        self.folder = folder
        self.store = store
        self.now = time.time()
        self.files = FileFolders(folder, FileLimits(**limits), lambda: self.now)
        self.tools = {tool.name: tool for tool in file_tools(self.files)}

    def __call__(self, name: str, /, *, key: str = "", **arguments: Any) -> Any:
        return self.tools[name].bind(arguments, ToolContext(store_id=self.store, call_id=key or next(KEYS)))()

    def value(self, name: str, /, **arguments: Any) -> Any:
        returned = self(name, **arguments)
        return returned.value if isinstance(returned, Reversible) else returned

    def undo(self, returned: Any) -> Any:
        assert isinstance(returned, Reversible)
        return self(returned.inverse.tool_name, **returned.inverse.arguments)

    def tree(self) -> dict[str, str | None]:
        root = self.folder / self.store
        return {
            str(path.relative_to(root)): path.read_text() if path.is_file() else None
            for path in sorted(root.rglob("*"))
        }


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip fsync, because these tests do not simulate power cuts."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "secret").write_text(SECRET)
    return Desk(tmp_path / "files")


def test_files_can_be_written_read_listed_edited_moved_and_deleted(desk: Desk) -> None:
    assert desk.value("write_file", path="notes/plan.md", content="Grüße\n")["created"]
    desk("append_file", path="notes/plan.md", content="one two\n")
    desk("edit_file", path="notes/plan.md", old_text="two", new_text="three")
    desk("make_folder", path="old")
    desk("move_file", path="notes/plan.md", new_path="old/2026/plan.md")
    piece = desk("read_file", path="old/2026/plan.md", offset=0, length=4)
    assert (piece["text"], piece["next_offset"], piece["total_bytes"]) == ("Grü", 4, 18)
    assert piece["sha256"] == hashlib.sha256("Grüße\none three\n".encode()).hexdigest()
    listed = desk("list_files")["entries"]
    assert [(entry["name"], entry["kind"]) for entry in listed] == [("notes", "folder"), ("old", "folder")]
    assert desk("list_files", path="old/2026")["entries"][0]["bytes"] == 18
    for path in ("old/2026/plan.md", "notes"):
        desk("delete_file", path=path)
    assert desk.tree() == {"old": None, "old/2026": None}


def test_each_change_is_reverted_by_its_inverse(desk: Desk) -> None:
    """HITL-7: afterwards, the files are the same as before."""
    desk("write_file", path="a", content="one two one")
    before = desk.tree()
    calls: list[tuple[str, dict[str, Any]]] = [
        ("write_file", {"path": "b", "content": "new"}),
        ("write_file", {"path": "a", "content": "other", "overwrite": True}),
        ("append_file", {"path": "a", "content": " more"}),
        ("append_file", {"path": "c", "content": "more"}),
        ("edit_file", {"path": "a", "old_text": "two", "new_text": "three"}),
        ("edit_file", {"path": "a", "old_text": "two", "new_text": "one"}),
        ("edit_file", {"path": "a", "old_text": " two", "new_text": ""}),
        ("move_file", {"path": "a", "new_path": "z"}),
        ("make_folder", {"path": "folder"}),
        ("delete_file", {"path": "a"}),
    ]
    for name, arguments in calls:
        returned = desk(name, **arguments)
        assert desk.tree() != before
        desk.undo(returned)
        assert desk.tree() == before, name


def test_an_inverse_does_not_touch_later_changes(desk: Desk) -> None:
    made = desk("write_file", path="a", content="mine")
    written = desk("write_file", path="a", content="mine too", overwrite=True)
    desk("append_file", path="a", content=", and yours")
    for returned in (made, written):
        with pytest.raises(ToolError, match="has changed"):
            desk.undo(returned)
    assert desk.tree() == {"a": "mine too, and yours"}


def test_a_large_file_is_not_overwritten_and_its_changes_have_no_inverse(desk: Desk) -> None:
    rows: list[tuple[str, dict[str, str], bool]] = [
        ("write_file", {"path": "a", "content": "x" * (UNDO_BYTES_MAX + 1)}, True),
        ("append_file", {"path": "a", "content": "y"}, False),
        ("edit_file", {"path": "a", "old_text": "xy", "new_text": "xz"}, True),
        ("delete_file", {"path": "a"}, False),
        ("write_file", {"path": "c", "content": "\x01" * 40_000}, True),  # six times as long in JSON
        ("delete_file", {"path": "c"}, False),
        ("write_file", {"path": "a", "content": "x" * (UNDO_BYTES_MAX + 1)}, True),
    ]
    for name, arguments, is_reversible in rows:
        assert isinstance(desk(name, **arguments), Reversible) is is_reversible, name
    with pytest.raises(ToolError, match="could not be undone"):
        desk("write_file", path="a", content="small", overwrite=True)


@for_each(
    ("name", "arguments", "text"),
    [
        ("read_file", {"path": "pln"}, "did you mean 'plan'"),
        ("read_file", {"path": "folder"}, "is a folder"),
        ("read_file", {"path": "plan/x"}, "not a folder"),
        ("list_files", {"path": "plan"}, "not a folder"),
        ("list_files", {"path": "none"}, "'none' does not exist"),
        ("write_file", {"path": "plan", "content": "x"}, "set overwrite"),
        ("write_file", {"path": "folder", "content": "x"}, "is a folder"),
        ("write_file", {"path": "plan/x", "content": "x"}, "not a folder"),
        ("edit_file", {"path": "plan", "old_text": "c", "new_text": "x"}, "does not occur"),
        ("edit_file", {"path": "plan", "old_text": "aa", "new_text": "x"}, "more than once"),
        ("edit_file", {"path": "none", "old_text": "a", "new_text": "x"}, "'none' does not exist"),
        ("move_file", {"path": "none", "new_path": "x"}, "'none' does not exist"),
        ("move_file", {"path": "plan", "new_path": "folder"}, "'folder' already exists"),
        ("move_file", {"path": "folder", "new_path": "folder/x"}, "into itself"),
        ("make_folder", {"path": "plan"}, "is a file"),
        ("delete_file", {"path": "none"}, "does not exist"),
        ("delete_file", {"path": "folder"}, "not empty"),
        ("delete_file", {"path": "plan", "expected_sha256": "0" * 64}, "has changed"),
    ],
)
def test_a_failed_operation_is_reported_and_has_no_effect(
    desk: Desk, name: str, arguments: dict[str, Any], text: str
) -> None:
    desk("write_file", path="plan", content="aaab", overwrite=True)
    desk("write_file", path="folder/deep", content="b", overwrite=True)
    before = desk.tree()
    with pytest.raises(ToolError, match=text) as error:
        desk(name, **arguments)
    assert str(desk.folder) not in str(error.value)
    assert desk.tree() == before


def test_limits_of_files_and_stores_are_enforced(tmp_path: Path) -> None:
    desk = Desk(tmp_path, file_bytes_max=100, store_bytes_max=150, entries_max=4)
    desk("write_file", path="a/b", content="x" * 100)
    many = "at most 4 files and folders"
    rows: list[tuple[str, dict[str, Any], str]] = [
        ("append_file", {"path": "a/b", "content": "y"}, "over the limit of 100"),
        ("write_file", {"path": "c", "content": "x" * 51}, "would be 151 bytes"),
        ("write_file", {"path": "c", "content": "x" * 50}, ""),
        ("make_folder", {"path": "d/e"}, many),
        ("write_file", {"path": "d/e", "content": ""}, many),
        ("move_file", {"path": "c", "new_path": "d/e/c"}, many),
    ]
    for name, arguments, refusal in rows:
        with pytest.raises(ToolError, match=refusal) if refusal else nullcontext():
            desk(name, **arguments)
    desk("make_folder", path="d")
    desk("write_file", path="c", content="x" * 40, overwrite=True)
    assert Desk(tmp_path, store="other", store_bytes_max=10).value("write_file", path="c", content="x" * 10)["created"]


def test_moves_never_create_paths_over_the_depth_limit(desk: Desk) -> None:
    deep = "/".join("abcdefgh")
    for path in (deep, f"x/{deep}"):
        desk("make_folder", path=path)
    with pytest.raises(ToolError, match="more than 16 parts"):
        desk("move_file", path="a", new_path="x/" + deep + "/a")


@pytest.mark.parametrize("entry_path", ["link", "folder/link", "loop/x", "link/passwd"])
def test_links_devices_and_pipes_are_never_touched(desk: Desk, entry_path: str, tmp_path: Path) -> None:
    desk("make_folder", path="folder")
    root = desk.folder / desk.store
    (root / "link").symlink_to(tmp_path)
    (root / "folder/link").symlink_to(tmp_path / "secret")
    (root / "loop").symlink_to("loop")
    os.mkfifo(root / "pipe")
    calls: list[tuple[str, dict[str, Any]]] = [
        ("read_file", {}),
        ("write_file", {"content": "x", "overwrite": True}),
        ("append_file", {"content": "x"}),
        ("edit_file", {"old_text": "of", "new_text": "x"}),
        ("make_folder", {}),
        ("move_file", {"new_path": "free"}),
        ("delete_file", {}),
    ]
    for path in (entry_path, "pipe"):
        for name, arguments in calls:
            with pytest.raises(ToolError) as error:
                desk(name, path=path, **arguments)
            assert SECRET not in str(error.value)
        with pytest.raises(ToolError):
            desk("list_files", path=path)
    assert (tmp_path / "secret").read_text() == SECRET
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "secret"]
    assert {entry["kind"] for entry in desk("list_files")["entries"] if entry["name"] != "folder"} == {"other"}


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["read_file", "write_file", "append_file", "make_folder", "move_file", "list_files"]),
    path=st.lists(st.sampled_from(["..", ".", "", "a", "out", "etc", "secret", "\0", "\ud800", "~"]), max_size=6).map(
        "/".join
    )
    | st.text(max_size=20),
)
def test_no_path_escapes_the_stores_folder(desk: Desk, tmp_path: Path, name: str, path: str) -> None:
    more = {"write_file": {"content": "x"}, "append_file": {"content": "x"}, "move_file": {"new_path": path + "x"}}
    root = desk.folder / desk.store
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "out").is_symlink():
        (root / "out").symlink_to(tmp_path)
    with suppress(ToolError):
        assert SECRET not in str(desk.value(name, path=path, **more.get(name, {})))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["files", "secret"]
    assert {entry.name for entry in desk.folder.iterdir()} <= {"acme", "acme.state"}
    assert (tmp_path / "secret").read_text() == SECRET


def test_swapping_a_folder_for_a_link_does_not_allow_an_escape(desk: Desk, tmp_path: Path) -> None:
    """Another process repeatedly replaces a folder by a link while the tools use its files."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "plan").write_text(SECRET)
    root = desk.folder / desk.store
    desk("write_file", path="box/plan", content="mine")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for step in (
                lambda: (root / "box").rename(root / "away"),
                lambda: (root / "box").symlink_to(outside),
                (root / "box").unlink,
                lambda: shutil.rmtree(root / "box"),  # The folder recreated during a swap.
                lambda: (root / "away").rename(root / "box"),
            ):
                with suppress(OSError):
                    step()

    with ThreadPoolExecutor(1) as pool:
        swapping = pool.submit(swap)
        read = 0
        for number in range(300):
            content: dict[str, Any] = {"content": f"mine {number}", "overwrite": True} if number % 2 else {}
            with suppress(ToolError):
                assert SECRET not in str(
                    desk.value("write_file" if content else "read_file", path="box/plan", **content)
                )
                read += 1
        stop.set()
        swapping.result()
    assert read
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"plan": SECRET}


def test_stores_do_not_share_files(desk: Desk) -> None:
    """I13: no path leads to the files of another store."""
    other = Desk(desk.folder, store="other")
    desk("write_file", path="plan", content="ours")
    with pytest.raises(ToolError, match="the file 'plan' does not exist"):
        other("read_file", path="plan")
    other("write_file", path="plan", content="theirs")
    assert (desk("read_file", path="plan")["text"], other("read_file", path="plan")["text"]) == ("ours", "theirs")
    for path in ("../acme/plan", "acme/plan", "../acme.state/lock"):
        with pytest.raises(ToolError):
            other("read_file", path=path)


@for_each("store", ["..", "a/b", "", "acme.state", "a\0b"])
def test_no_folder_is_created_for_an_invalid_store_id(tmp_path: Path, store: str) -> None:
    with pytest.raises(Exception, match=r"store_id (must have|is required)"):
        Desk(tmp_path / "files", store=store)("write_file", path="a", content="x")
    assert not list(tmp_path.iterdir())


def test_concurrent_edits_by_several_processes_are_not_lost(desk: Desk) -> None:
    """C4: each Desk locks the folder separately, as a separate process would."""
    desk("write_file", path="list", content="")
    desks = [Desk(desk.folder) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        done = [
            pool.submit(desks[number % 4], "append_file", path="list", content=f"{number}\n") for number in range(40)
        ]
        for each in done:
            each.result()
    assert sorted(map(int, desk.tree()["list"].split())) == list(range(40))  # type: ignore[union-attr]


def test_waiting_for_the_lock_ends_when_the_call_is_cancelled(desk: Desk) -> None:
    inside, release = threading.Event(), threading.Event()

    def busy(_: Any) -> Any:
        inside.set()
        release.wait(30)
        raise ToolError("no")

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(desk.files.change, StoreId("acme"), "busy", busy, lambda _: False)
        assert inside.wait(30)
        with pytest.raises(ToolCancelled):
            desk.files.change(StoreId("acme"), "late", busy, lambda _: True)
        release.set()
        assert isinstance(holding.exception(), ToolError)


class Crash(BaseException):
    """Raised instead of ending the process."""


CHANGES: list[tuple[str, dict[str, Any], bool]] = [
    ("write_file", {"path": "plan", "content": "x", "overwrite": True}, True),
    ("edit_file", {"path": "plan", "old_text": "b", "new_text": "bb"}, True),
    ("move_file", {"path": "folder", "new_path": "elsewhere"}, True),
    ("make_folder", {"path": "new/folder"}, False),
    ("delete_file", {"path": "plan"}, True),
    ("delete_file", {"path": "empty"}, False),
]
STEPS = ("open", "rename", "unlink", "rmdir", "mkdir", "fsync", "close")


def crash_at(step: int, patch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Simulate a crash before system call number `step`. The returned function reports whether it was reached."""
    count = itertools.count()
    reached: list[bool] = []

    def counted(real: Any, *, ends: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if ends and (reached or next(count) == step):
                reached.append(True)
                raise Crash
            return real(*args, **kwargs)

        return call

    for name in STEPS:
        patch.setattr(os, name, counted(getattr(os, name), ends=name != "close"))
    return lambda: bool(reached)


@for_each(("name", "arguments", "other_call"), CHANGES)
def test_a_call_repeated_after_a_crash_at_any_moment_takes_effect_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, arguments: dict[str, Any], *, other_call: bool
) -> None:
    """I5: with `other_call`, another call changes the file before the first call is repeated."""
    tmp_path = tmp_path_factory.mktemp("crash")

    def start(folder: Path) -> Desk:
        desk = Desk(folder)
        desk("write_file", path="plan", content="abc")
        desk("make_folder", path="folder")
        desk("make_folder", path="empty")
        return desk

    expected = start(tmp_path / "expected")
    returned = expected(name, key="once", **arguments)
    for step in itertools.count():
        desk = start(tmp_path / str(step))
        with pytest.MonkeyPatch.context() as patch:
            crashed = crash_at(step, patch)
            with suppress(Crash):
                desk(name, key="once", **arguments)
        again = Desk(desk.folder)
        if other_call:
            again("write_file", path="other", content="")
        assert again(name, key="once", **arguments) == returned
        tree = again.tree()
        if other_call:
            tree.pop("other")
        assert tree == expected.tree(), step
        assert sorted(path.name for path in (desk.folder / "acme.state").iterdir()) == ["done", "lock"]
        if not crashed():
            break
    assert step > 10


def test_records_of_old_calls_are_pruned(desk: Desk) -> None:
    desk("write_file", path="plan", content="one", key="k")
    records = desk.folder / "acme.state/done"
    assert [path.name for path in records.iterdir()] == ["k"]
    os.utime(records / "k", (0, desk.now - RECORD_SECONDS - 1))
    keys = [f"l{number}" for number in range(1000)]
    pruning = next(key for key in keys if zlib.crc32(key.encode()) % 100 == 0)
    desk("make_folder", path="folder", key="other")
    desk("make_folder", path="folder", key=pruning)
    assert sorted(path.name for path in records.iterdir()) == sorted([pruning, "other"])


@for_each("path", ["a", "notes/plan.md", "ä/ø/日本語.txt", ".hidden", "a b/c d", "...", "-rf", "x" * 200])
def test_plain_paths_are_accepted(path: str) -> None:
    assert not path_problem(path)


@for_each(
    "path",
    [
        *("", "/", "/etc/passwd", "..", ".", "../x", "a/..", "a/../b", "a/./b", "./a", "a//b", "a/", "//a"),
        *("a\\b", "..\\x", "C:\\x", "a\0b", "a\nb", "a\x7fb", "a\u202eb", "a\u200bb", "\ufeffa", "a\u2028b"),
        *("a\u00a0b", " a", "a ", "a/ b", "e\u0301", "x" * 201, "ø" * 101, "/".join("a" * 17), "a" * 513, "\ud800"),
    ],
)
def test_unusual_paths_are_refused_with_a_reason(path: str) -> None:
    assert path_problem(path)


@given(st.text(st.sampled_from("ab./\\ \0\u0301e\u00e9~\u202e")) | st.text())
def test_an_accepted_path_stays_in_its_folder_and_is_normalised(path: str) -> None:
    if path_problem(path):
        return
    assert os.path.normpath(f"/root/{path}") == f"/root/{path}"
    assert unicodedata.normalize("NFC", path) == path
    assert "\0" not in path
