"""process_file counts, filters and groups files of any size, and continues after a restart (TOOL-7)."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import statistics
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pawl.chassis.process.tasks import save_nothing
from pawl.tool_registry.builtin.files import processing, tally
from pawl.tool_registry.builtin.files.staging import StagedFile
from pawl.tool_registry.builtin.files.tally import Query, Tally
from pawl.tools import ToolCancelled, ToolContext, ToolError
from pawl.tools.sdk.context import Superseded
from tests.tables import for_each
from tests.unit.tool_registry.test_file_folders import Desk

SALES = 'region,amount,note\nnorth,10.10,"a, b"\nsouth,2,\nnorth,0.2,"two\nlines"\neast,none,x\n\nnorth\n'
_CELLS = st.one_of(
    st.sampled_from(["", "a", "b", "ü", '"', "x,y", "two\nlines", " 5 ", "-1.5", "1e3", "1e400", "nan", "_1", "0.1"]),
    st.just("a\rb"),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3),
)
_ROWS = st.lists(st.lists(_CELLS, min_size=3, max_size=3), max_size=12)
_COLUMNS = st.lists(st.sampled_from(["one", "two", "three"]), max_size=3)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(processing, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(processing, "PIECE_BYTES", 64)
    monkeypatch.setattr(processing, "CHECKPOINT_BYTES", 400)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path / "files")
    yield made
    assert staged(made) == []


def put(desk: Desk, path: str, content: str | bytes) -> None:
    file = desk.folder / desk.store / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


def staged(desk: Desk) -> list[str]:
    return [path.name for path in desk.folder.glob("*.state/staged-*")]


def as_csv(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    return text.getvalue()


def parsed(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


def naive(rows: list[list[str]], group_by: list[str], measure: str, pattern: str) -> dict[tuple[str, ...], list[Any]]:
    """Return the count, sum, mean, minimum and maximum of each group, computed in the obvious way."""
    header = ["one", "two", "three"]
    kept_rows = [row for row in rows if re.search(pattern, ",".join(row))]
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for row in kept_rows:
        groups.setdefault(tuple(row[header.index(name)] for name in group_by), []).append(row)
    found: dict[tuple[str, ...], list[Any]] = {}
    for key, members in groups.items():
        texts = [row[header.index(measure)].strip() for row in members]
        numbers = [Decimal(text) for text in texts if re.fullmatch(r"[-+]?\d+\.?\d*(e\d\d?)?", text, re.ASCII)]
        figures = [sum(numbers), statistics.mean(numbers), min(numbers), max(numbers)] if numbers else [None] * 4
        found[key] = [len(members), *(None if each is None else pytest.approx(float(each)) for each in figures)]
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(_ROWS, _COLUMNS, st.sampled_from(["one", "two"]), st.sampled_from(["", "a", "[0-9]", "^b"]), st.data())
def test_groups_equal_those_of_a_naive_model_even_after_a_restart(
    rows: list[list[str]], group_by: list[str], measure: str, pattern: str, data: st.DataObject
) -> None:
    group_by = list(dict.fromkeys(group_by))
    query = Query(pattern=pattern, group_by=group_by, measures=[measure])
    header = ["one", "two", "three"]
    counted = Tally(query, header)
    cut = data.draw(st.integers(0, len(rows)))
    for row in rows[:cut]:
        counted.add(row)
    saved = json.loads(json.dumps([counted.saved_counts(), counted.saved_groups()]))
    counted = Tally(query, header)
    counted.restore(*saved)
    for row in rows[cut:]:
        counted.add(row)
    _, groups = counted.groups()
    expected = naive(rows, group_by, measure, pattern)
    assert {tuple(row[: len(group_by)]): row[len(group_by) :] for row in groups} == expected
    assert [row[len(group_by)] for row in groups] == sorted((each[0] for each in expected.values()), reverse=True)
    assert counted.matched == sum(each[0] for each in expected.values())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(_ROWS, _COLUMNS, st.booleans())
def test_the_output_has_the_chosen_columns_of_all_rows_even_after_restarts(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], columns: list[str], is_grouped: bool
) -> None:
    desk = Desk(tmp_path_factory.mktemp("files"))
    put(desk, "in.csv", as_csv([["one", "two", "three"], *rows * 30]))
    arguments: dict[str, Any] = {"path": "in.csv", "output_path": "out/all.csv"}
    arguments |= {"group_by": columns or ["one"]} if is_grouped else {"columns": columns or ["one", "two", "three"]}
    whole = desk("process_file", **arguments).value
    expected = (desk.folder / "acme/out/all.csv").read_bytes()
    value = killed_at_each_checkpoint(desk, "process_file", arguments | {"output_path": "out/again.csv"})
    assert (desk.folder / "acme/out/again.csv").read_bytes() == expected
    assert {**value, "output_path": ""} == {**whole, "output_path": ""}
    assert staged(desk) == []
    if not is_grouped:
        names = ["one", "two", "three"]
        wanted = [[row[names.index(name)] for name in columns or names] for row in rows * 30]
        wanted = [row for row, of in zip(wanted, rows * 30, strict=True) if as_csv([of]).strip("\n")]
        assert parsed(expected.decode())[1:] == parsed(as_csv(wanted))


def killed_at_each_checkpoint(desk: Desk, name: str, arguments: dict[str, Any]) -> Any:
    """Run a call whose process dies a few pieces after each checkpoint, and return its final value."""
    saved: list[Any] = [None]
    pieces_left = 0

    def save(content: bytes) -> Future[None]:
        nonlocal pieces_left
        saved.append(json.loads(content))
        pieces_left = 4
        return save_nothing(content)

    def report(fraction: float | None, message: str) -> None:
        nonlocal pieces_left
        pieces_left -= 1
        if not pieces_left:
            raise Superseded("the process has died")

    for attempt in range(1, 1000):
        pieces_left = 0
        context = ToolContext(
            store_id=desk.store,
            call_id="killed",
            attempt=attempt,
            last_checkpoint=saved[-1],
            _save=save,
            _report=report,
        )
        try:
            returned = desk.tools[name].bind(arguments, context)()
            return getattr(returned, "value", returned)
        except Superseded:
            assert None in saved[-2:] or saved[-1]["offset"] > saved[-2]["offset"]
    raise AssertionError("the call never ended")


def test_a_call_that_dies_after_writing_its_groups_starts_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing, "CHECKPOINT_BYTES", 600)
    rows = (f"g{number % 7},{number % 10},{number % 3},{number % 4},{number % 6}\n" for number in range(100))
    put(desk, "in.csv", "g,a,b,c,d\n" + "".join(rows))
    arguments: dict[str, Any] = {
        "path": "in.csv",
        "group_by": ["g"],
        "measures": ["a", "b", "c", "d"],
        "output_path": "out.csv",
    }
    expected = desk("process_file", **arguments | {"output_path": "same.csv"}).value
    real, deaths = StagedFile.sha256, iter([Superseded("the process has died")])

    def sha256(file: StagedFile) -> str:
        for death in deaths:
            raise death
        return real(file)

    monkeypatch.setattr(StagedFile, "sha256", sha256)
    assert killed_at_each_checkpoint(desk, "process_file", arguments) == expected | {"output_path": "out.csv"}


def test_a_header_may_have_line_breaks_and_separators_in_quotes(desk: Desk) -> None:
    put(desk, "in.csv", '"a, b, c";"full\nname";age\ny;x;1\n' + f";{'z' * 100_000};2\n")
    found = desk("process_file", path="in.csv", columns=["age", "a, b, c"], output_path="out.csv").value
    assert (found["rows"], found["sample"]) == (2, ["1,y", "2,"])
    assert (desk.folder / "acme/out.csv").read_bytes() == b"age;a, b, c\n1;y\n2;\n"


def test_a_csv_file_is_summarised(desk: Desk) -> None:
    put(desk, "sales.csv", SALES)
    found = desk("process_file", path="sales.csv", group_by=["region"], measures=["amount"])
    assert found == {
        "path": "sales.csv",
        "bytes": len(SALES),
        "rows": 5,
        "matched": 5,
        "group_count": 3,
        "columns": ["region", "count", "sum_amount", "mean_amount", "min_amount", "max_amount"],
        "groups": [["north", 3, 10.3, 5.15, 0.2, 10.1], ["east", 1, *[None] * 4], ["south", 1, 2, 2, 2, 2]],
    }
    found = desk("process_file", path="sales.csv", pattern="th$", pattern_column="region", columns=["note", "region"])
    assert (found["matched"], found["sample"][0]) == (4, "a, b,north")


def test_lines_of_a_text_file_are_counted_and_filtered_into_a_new_file(desk: Desk) -> None:
    put(desk, "log.txt", "ok one\r\nfail two\n\nfail ü")
    made = desk("process_file", path="log.txt", pattern="^fail", output_path="logs/failed.txt")
    assert (made.value["lines"], made.value["matched"], made.value["sample"]) == (4, 2, ["fail two", "fail ü"])
    assert (desk.folder / "acme/logs/failed.txt").read_text() == "fail two\nfail ü\n"
    desk.undo(made)
    assert not (desk.folder / "acme/logs/failed.txt").exists()


def test_a_repeated_call_returns_the_first_outcome(desk: Desk) -> None:
    put(desk, "in.txt", "a\n")
    arguments = {"path": "in.txt", "output_path": "out.txt"}
    first = desk("process_file", key="same", **arguments)
    put(desk, "in.txt", "b\n")
    assert desk("process_file", key="same", **arguments) == first


BAD_INPUT: dict[str, str | bytes] = {
    "in.csv": SALES,
    "folder/x": "",
    "empty": "",
    "binary": b"a\n\xff\n",
    "long": b"a" * 400_000,
    "quote.csv": 'a,b\n"' + "x\n" * 200_000,
    "break.csv": "a,b\n1,2\n3,x\ry\n",
    "row.csv": "a,b\n" + ('"x","' + "y\n" * 50_000) + ('","' + "y\n" * 50_000) * 5,
    "many.csv": "a\n1\n2\n3\n4\n",
}


@for_each(
    ("arguments", "hint"),
    [
        ({"path": "no.csv"}, "does not exist"),
        ({"path": "folder"}, "is a folder"),
        ({"path": "../secret"}, "must not contain '..'"),
        ({"path": "/in.csv"}, "must not start with a slash"),
        ({"path": "in.csv", "output_path": "../x"}, "must not contain '..'"),
        ({"path": "in.csv", "output_path": "in.csv"}, "already exists"),
        ({"path": "in.csv", "columns": ["regoin"]}, "did you mean 'region'?"),
        ({"path": "in.csv", "group_by": ["x"]}, "no column 'x'. Its columns are: region, amount"),
        ({"path": "in.csv", "measures": ["x"]}, "no column 'x'"),
        ({"path": "in.csv", "pattern": "a", "pattern_column": "x"}, "no column 'x'"),
        ({"path": "in.csv", "pattern": "(?=a)b"}, "not supported"),
        ({"path": "in.csv", "pattern": "a{1000}{1000}"}, "too large"),
        ({"path": "binary"}, "not UTF-8 text: see byte 2"),
        ({"path": "long"}, "longer than"),
        ({"path": "quote.csv", "columns": ["a"]}, "field larger than field limit (131072)"),
        ({"path": "break.csv", "columns": ["a"]}, "the CSV row after row 1 cannot be read: new-line character"),
        ({"path": "row.csv", "columns": ["a"]}, "longer than"),
        ({"path": "empty", "columns": ["a"]}, "no column 'a'"),
        ({"path": "many.csv", "group_by": ["a"]}, "more than 3 groups"),
    ],
)
def test_bad_input_is_refused_with_a_reason_and_leaves_nothing_behind(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], hint: str
) -> None:
    monkeypatch.setattr(tally, "GROUPS_MAX", 3)
    monkeypatch.setattr(processing, "ROW_BYTES_MAX", 300_000)
    for path, content in BAD_INPUT.items():
        put(desk, path, content)
    before = sorted(path for path in desk.folder.rglob("*") if ".state" not in str(path))
    with pytest.raises(ToolError, match=re.escape(hint)):
        desk("process_file", **arguments)
    assert sorted(path for path in desk.folder.rglob("*") if ".state" not in str(path)) == before


def test_output_over_the_quota_is_refused_midway(tmp_path: Path) -> None:
    desk = Desk(tmp_path, store_bytes_max=3000)
    put(desk, "in.txt", "0123456789\n" * 200)
    with pytest.raises(ToolError, match="at most 800 bytes"):
        desk("process_file", path="in.txt", output_path="out.txt")
    assert (staged(desk), [path.name for path in (tmp_path / "acme").iterdir()]) == ([], ["in.txt"])


def test_a_changed_file_is_processed_from_the_start(desk: Desk) -> None:
    put(desk, "in.txt", "a\n" * 400)
    saved: list[Any] = []

    def save(content: bytes) -> Future[None]:
        saved.append(json.loads(content))
        return save_nothing(content)

    run = desk.tools["process_file"]
    run.bind({"path": "in.txt"}, ToolContext(store_id="acme", _save=save))()
    assert saved[-1]["rows"] > 0
    put(desk, "in.txt", "bbb\n" * 270)
    assert run.bind({"path": "in.txt"}, ToolContext(store_id="acme", last_checkpoint=saved[-1]))()["lines"] == 270


def test_a_cancelled_call_ends_soon_and_leaves_nothing_behind(desk: Desk) -> None:
    put(desk, "in.txt", "a\n" * 1000)
    cancelled = threading.Event()
    cancelled.set()
    context = ToolContext(store_id="acme", _cancelled=cancelled)
    with pytest.raises(ToolCancelled):
        desk.tools["process_file"].bind({"path": "in.txt", "output_path": "out"}, context)()


def test_the_output_is_kept_if_another_process_will_continue(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    put(desk, "in.txt", "a\n" * 1000)
    cancelled = threading.Event()
    seen: list[str] = []

    def report(fraction: float | None, message: str) -> None:
        seen.append(message)
        if fraction and fraction > 0.5:
            cancelled.set()

    context = ToolContext(store_id="acme", _cancelled=cancelled, _report=report, _will_restart=lambda: True)
    arguments = {"path": "in.txt", "output_path": "out"}
    with pytest.raises(ToolCancelled):
        desk.tools["process_file"].bind(arguments, context)()
    assert (staged(desk), seen[0]) == (["staged-run-call"], "0 rows")
    desk.now += 90_000
    desk("process_file", path="in.txt", output_path="other")
    assert staged(desk) == []


def test_a_large_file_takes_bounded_memory(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 128 MiB file is sparse: each read returns `piece` instead of zeros."""
    monkeypatch.setattr(processing, "PIECE_BYTES", 256 * 1024)
    monkeypatch.setattr(processing, "CHECKPOINT_BYTES", 8 * 1024 * 1024)
    piece = ("x" * 4095 + "\n").encode() * 64
    real, size = os.pread, 128 * 1024**2
    put(desk, "in.txt", b"")
    os.truncate(desk.folder / "acme/in.txt", size)

    def pread(handle: int, count: int, offset: int) -> bytes:
        return real(handle, count, offset) and piece

    monkeypatch.setattr(os, "pread", pread)
    tracemalloc.start()
    try:
        found = desk("process_file", path="in.txt", pattern="nothing")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found["bytes"], found["lines"], peak < 16 * 1024 * 1024) == (size, size // 4096, True)
