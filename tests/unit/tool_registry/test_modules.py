"""Modules, packages and folders of tools (TOOL-3)."""

from __future__ import annotations

import asyncio
import email
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.identity.auth import Principal, local_principal, set_principal, user_principal
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.chassis.process.start import StartError
from pawl.errors import InvalidField, PermissionDenied
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import source_pb2 as pb
from pawl.tool_registry.sources.mcp.permission import read_programs_file
from pawl.tool_registry.sources.mcp.rules import ProgramRule, refusal_reason
from pawl.tool_registry.sources.python.modules import (
    DeploymentTools,
    ToolModule,
    folder_of,
    forget_folders,
    load_modules,
)
from pawl.tool_registry.sources.rpc import SourceServicer
from pawl.tool_registry.sources.rules import (
    DiscoveredTool,
    changes,
    check_source_name,
    definitions_hash,
    plain_schema,
    registered_names,
)
from pawl.tool_registry.sources.source import Source, check_policies, under_policies
from pawl.tools.rules.definition import ToolDefinition, can_exist
from pawl.values import Category, EffectClass
from tests.tables import for_each, not_refused

TOOL = '''
from pawl.tools import tool
{before}

@tool
def {name}() -> str:
    """Say it."""
    return {value}
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def module(name: str = "", *, before: str = "", value: str = "'said'") -> str:
    return TOOL.format(name=name, before=before, value=value) if name else before


def write(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def loaded(*entries: str) -> dict[str, list[str]]:
    return {module.name: [tool.name for tool in module.tools] for module in load_modules(entries) if module.tools}


def broken(*entries: str) -> list[ToolModule]:
    return [module for module in load_modules(entries) if module.error]


@pytest.mark.parametrize(
    ("files", "entries", "tools"),
    [
        (
            {
                "pack/__init__.py": "",
                "pack/money.py": module("convert"),
                "pack/deep/__init__.py": module("here"),
                "pack/deep/below.py": module("there"),
                "pack/_hidden.py": module("hidden"),
            },
            ["pack"],
            {"pack.deep": ["here"], "pack.deep.below": ["there"], "pack.money": ["convert"]},
        ),
        (
            {
                "plain/money.py": module("convert"),
                "plain/pack/__init__.py": module("packed"),
                "plain/_shared.py": module("hidden"),
                "other/single.py": module("single"),
                "other/left.py": module("left"),
            },
            ["plain", "./other/single.py"],
            {"plain.money": ["convert"], "plain.pack": ["packed"], "single": ["single"]},
        ),
        (
            {"pack/__init__.py": "from pack.money import convert", "pack/money.py": module("convert")},
            ["pack", "pack.money"],
            {"pack": ["convert"]},
        ),
    ],
    ids=["a package", "a folder and a file", "a tool that another module imports"],
)
def test_each_tool_of_packages_folders_and_files_is_loaded_once(
    folder: Path, files: dict[str, str], entries: list[str], tools: dict[str, list[str]]
) -> None:
    write(folder, files)
    assert loaded(*entries) == tools


SHARING = module("share", before="from . import _shared", value="_shared.WORD")


def test_modules_of_a_folder_share_code_by_relative_imports(folder: Path) -> None:
    write(folder, {"kit/_shared.py": "WORD = 'shared'", "kit/user.py": SHARING})
    (imported,) = load_modules(["./kit"])
    assert imported.tools[0]() == "shared"


def test_a_module_in_a_folder_does_not_shadow_an_installed_one(folder: Path) -> None:
    """Even after the folder is loaded, imports of `email` get the standard library's module."""
    kind = module("kind", before="from email import message", value="message.__name__")
    write(folder, {"kit/email.py": module("send"), "kit/user.py": kind})
    modules = {module.name: module for module in load_modules(["./kit"])}
    assert modules["kit.user"].tools[0]() == "email.message"
    assert sys.modules["email"] is email
    imported = modules["kit.email"].tools[0].function.__module__
    assert folder_of(imported) == (folder / "kit").resolve()
    assert folder_of("email") is None


@pytest.mark.parametrize("entry", ["pack", "./pack"])
def test_a_broken_module_is_reported_and_does_not_block_its_package(folder: Path, entry: str) -> None:
    files = {
        "__init__.py": "",
        "a_typo.py": "x = 1\ndef (:\n",
        "b_crash.py": "\n\nprint(1 / 0)\n",
        "c_needs.py": "import nothing_like_this\n",
        "d_works.py": module("works"),
        "e_refused.py": module("no_text", before="def helper(): pass").replace('    """Say it."""\n', ""),
    }
    write(folder / "pack", files)
    starts = [
        "a_typo.py:2: SyntaxError: ",
        "b_crash.py:3: ZeroDivisionError: division by zero",
        "c_needs.py:1: ModuleNotFoundError: No module named 'nothing_like_this'",
        "e_refused.py:5: ToolDefinitionError: no_text: description",
    ]
    for each, start in zip(broken(entry), starts, strict=True):
        assert each.error.startswith(f"{folder}/pack/{start}")
    assert [tool.name for each in load_modules([entry]) for tool in each.tools] == ["works"]


def test_a_folder_with_a_broken_init_still_loads_its_modules(folder: Path) -> None:
    write(folder, {"kit/__init__.py": "import nothing_like_this", "kit/works.py": module("works")})
    modules = list(load_modules(["./kit"]))
    assert [(module.name, bool(module.error)) for module in modules] == [("kit", True), ("kit.works", False)]
    assert modules[0].error.startswith(f"{folder}/kit/__init__.py:1: ModuleNotFoundError")


@pytest.mark.parametrize("entry", ["missing_module", "./missing", "./missing.py", "a..b"])
def test_a_missing_module_is_named(folder: Path, entry: str) -> None:
    assert [each.name for each in broken(entry)] == [entry]


class LoadedTools:
    """Stands in for the catalog."""

    def __init__(self) -> None:
        self.sources: dict[str, list[Any]] = {}
        self.has_changed = asyncio.Event()

    def forget(self, prefix: str) -> None:
        assert all(source.startswith(prefix) for source in self.sources)
        self.sources.clear()

    async def load(self, source: str, tools: Any) -> None:
        self.sources[source] = [tool() for tool in tools]
        self.has_changed.set()


async def test_changed_files_of_a_folder_are_imported_again_after_a_signal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a file keeps its size and the second of its last change, by which bytecode is checked."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    write(folder, {"kit/_shared.py": "WORD = 'one'", "kit/user.py": SHARING})
    catalog: Any = LoadedTools()
    tools = DeploymentTools(catalog, ["./kit"])
    await tools.load()
    assert catalog.sources == {"module:kit.user": ["one"]}
    reloading = asyncio.create_task(tools.reload_forever())
    for word in ("two", "six"):
        catalog.has_changed.clear()
        write(folder, {"kit/_shared.py": f"WORD = '{word}'", "kit/other.py": module("other")})
        os.utime(folder / "kit/_shared.py", (2e9, 2e9))
        os.kill(os.getpid(), signal.SIGUSR1)
        await catalog.has_changed.wait()
        await asyncio.sleep(0)
        assert catalog.sources == {"module:kit.other": ["said"], "module:kit.user": [word]}
    write(folder, {"kit/user.py": "(", "kit/other.py": module("other", value="'new'")})
    forget_folders()
    await tools.load()
    assert catalog.sources == {"module:kit.other": ["new"], "module:kit.user": ["six"]}, "broken: its tools stay"
    (folder / "kit/user.py").unlink()
    forget_folders()
    await tools.load()
    assert catalog.sources == {"module:kit.other": ["new"]}
    reloading.cancel()
    await asyncio.wait([reloading])
    asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)


# Sources: trust, tool names, changes, and the programs that they may start (TOOL-3).


SOURCE_NAMES = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,31}", fullmatch=True)


def found(name: str, description: str = "x", binding: bytes = b"") -> DiscoveredTool:
    definition = ToolDefinition(name=f"s.{name}", description=description, arguments_schema={"type": "object"})
    return DiscoveredTool(definition=definition, binding=binding)


@given(SOURCE_NAMES, st.sets(st.text(max_size=80), max_size=20))
def test_server_tools_get_valid_and_distinct_names(source: str, names: set[str]) -> None:
    registered = registered_names(source, names)
    assert (set(registered), len(set(registered.values()))) == (names, len(names))
    assert all(can_exist(name) and name.startswith(f"{source}.") for name in registered.values())


def test_a_colliding_tool_name_does_not_replace_a_valid_one() -> None:
    assert registered_names("s", ["a b"]) == {"a b": "s.a_b"}
    both = registered_names("s", ["a b", "a_b"])
    assert both["a_b"] == "s.a_b"
    assert both["a b"] != both["a_b"]


def test_an_invalid_source_name_is_refused() -> None:
    assert not_refused(InvalidField, check_source_name, ["", "A", "a.b", "-a", "a" * 33, "a/b"]) == []


@for_each(
    ("name", "holds"),
    [("a.b", True), ("a.b.c", False), (".b", False), ("a.", False), ("x" * 61 + ".y", True), ("x" * 62 + ".y", False)],
)
def test_a_tool_name_may_contain_one_dot(name: str, holds: bool) -> None:
    assert can_exist(name) is holds


def test_a_tool_policy_overrides_the_default_policy() -> None:
    policies = [
        pb.SourceToolPolicy(tool_name="a", category=call_pb2.TOOL_CATEGORY_SAFE),
        pb.SourceToolPolicy(tool_name="*", effect_class=call_pb2.EFFECT_CLASS_IDEMPOTENT, timeout_seconds=3),
        pb.SourceToolPolicy(tool_name="gone", excluded=True),
    ]
    source = Source(store_id=StoreId("acme"), config=pb.SourceConfig(name="s", policies=policies))
    a, b = (tool.definition for tool in under_policies(source, [found("b"), found("gone"), found("a")]))
    assert (a.name, a.category, a.effect) == ("s.a", Category.SAFE, EffectClass.AT_MOST_ONCE)
    assert (b.name, b.category, b.effect, b.timeout_seconds) == ("s.b", Category.SENSITIVE, EffectClass.IDEMPOTENT, 3)
    bare = Source(store_id=StoreId("acme"), config=pb.SourceConfig(name="s"))
    assert under_policies(bare, [found("a")])[0].definition.category is Category.SENSITIVE


@for_each(
    "policies",
    [
        [{"toolName": "a"}, {"toolName": "a"}],
        [{"toolName": "a", "effectClass": "EFFECT_CLASS_RECONCILABLE"}],
        [{"toolName": "a", "category": 17}],
        [{"toolName": "a", "reports": {"reports": 17}}],
        [{"toolName": "a", "reports": {"reports": "JOB_REPORTS_DIGEST"}}],
        [{"toolName": "a", "reports": {"reports": "JOB_REPORTS_END", "reportIterations": 2}}],
        [{"toolName": "a", "reports": {"reports": "JOB_REPORTS_END"}, "withoutBackground": True}],
    ],
)
def test_invalid_policies_are_refused(policies: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidField):
        check_policies(json_format.ParseDict({"policies": policies}, pb.SourceConfig()).policies)


def test_changes_list_new_removed_and_modified_tools() -> None:
    approved = [found("same"), found("words"), found("bound"), found("gone")]
    now = [found("same"), found("words", "others"), found("bound", binding=b"1"), found("new")]
    assert [(change.tool_name, change.approved is None, change.found is None) for change in changes(approved, now)] == [
        ("s.bound", False, False),
        ("s.gone", False, True),
        ("s.new", True, False),
        ("s.words", False, False),
    ]
    assert definitions_hash(approved) != definitions_hash(now)
    assert definitions_hash(approved) == definitions_hash(approved[::-1])


def test_a_schema_in_an_older_dialect_keeps_its_common_subset() -> None:
    old = {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"a": {"type": "string"}}}
    assert plain_schema(old) == {"type": "object", "properties": {"a": {"type": "string"}}}
    assert plain_schema(None) == {"type": "object"}


OPERATOR = user_principal(
    StoreId("local"), UserId("olga"), frozenset({"operator", "admin"}), credential_id=CredentialId("key_1")
)
PROGRAM = pb.SourceConfig(name="mine", mcp_stdio=pb.McpStdioConfig(command=["id"]))
WEB = pb.SourceConfig(name="web", mcp_http=pb.McpHttpConfig(url="https://example.com/"))


class Asked(Exception):
    """Raised when a call reaches the use case."""


class Sources:
    async def add(self, *_: Any, **__: Any) -> None:
        raise Asked


@for_each(
    ("who", "config", "is_personal", "end"),
    [
        (OPERATOR, PROGRAM, True, pytest.raises(PermissionDenied, match="PAWL_MCP_PROGRAMS_FILE")),
        (local_principal({}), PROGRAM, True, pytest.raises(Asked)),
        (OPERATOR, WEB, True, pytest.raises(Asked)),
        (OPERATOR, PROGRAM, False, pytest.raises(Asked)),
    ],
)
async def test_a_private_registry_accepts_programs_only_from_its_local_key(
    who: Principal, config: pb.SourceConfig, *, is_personal: bool, end: Any
) -> None:
    """Elsewhere the servicer passes programs on: the use case refuses those that are not listed."""
    set_principal(who)
    sources: Any = Sources()
    nothing: Any = None
    with end:
        await SourceServicer(sources, is_personal=is_personal).AddSource(pb.AddSourceRequest(config=config), nothing)


ACME = StoreId("acme")

TIME = ProgramRule(command=("/opt/time", "--utc"), variables=("TZ",), paths=("/srv/data",))
ANY = ProgramRule(command=("/opt/any", "*"))


def wanted(*command: str, variables: tuple[str, ...] = (), paths: tuple[str, ...] = ()) -> ProgramRule:
    return ProgramRule(command=command, variables=variables, paths=paths)


@for_each(
    ("program", "says"),
    [
        (wanted("/opt/time", "--utc"), ""),
        (wanted("/opt/time", "--utc", variables=("TZ",), paths=("/srv/data", "/srv/data/deep")), ""),
        (wanted("/opt/any"), ""),
        (wanted("/opt/any", "a", "b"), ""),
        (wanted("/opt/time"), "command"),
        (wanted("/opt/time", "--utc", "--more"), "command"),
        (wanted("time", "--utc"), "command"),
        (wanted("/opt/time", "--utc", variables=("LD_PRELOAD",)), "LD_PRELOAD"),
        (wanted("/opt/time", "--utc", paths=("/srv",)), "/srv"),
        (wanted("/opt/time", "--utc", paths=("/srv/database",)), "/srv/database"),
        (wanted("/opt/any", paths=("/",)), "/"),
    ],
)
def test_only_a_listed_program_is_allowed(program: ProgramRule, says: str) -> None:
    reason = refusal_reason({"acme": [TIME, ANY]}, ACME, program)
    assert (says in reason, bool(reason)) == (True, bool(says))


def test_stores_without_rules_use_only_the_common_ones() -> None:
    rows: list[Any] = [({"acme": [TIME], "*": [ANY]}, "other"), ({"acme": [TIME], "*": [ANY]}, "acme"), ({}, "acme")]
    reasons = [refusal_reason(rules, StoreId(store_id), wanted("/opt/any")) for rules, store_id in rows]
    assert [reason == "" for reason in reasons] == [True, False, False]


def test_without_a_programs_file_nothing_is_listed(tmp_path: Path) -> None:
    assert read_programs_file(None) == {}
    path = tmp_path / "programs.json"
    path.write_text('{"acme": [{"command": ["/opt/time", "*"], "paths": ["/srv"]}]}')
    assert read_programs_file(path) == {"acme": [ProgramRule(command=["/opt/time", "*"], variables=[], paths=["/srv"])]}


@for_each(
    ("text", "says"),
    [
        ("[]", "must be JSON like"),
        ('{"*": [{"command": ["time"]}]}', "absolute path of a program"),
        ('{"*": [{"command": []}]}', "absolute path of a program"),
        ('{"*": [{"command": ["/a"], "paths": ["srv"]}]}', "paths must be absolute"),
        ('{"*": [{"command": ["/a"], "paths": ["/srv/../etc"]}]}', "paths must be absolute"),
        ('{"*": [{"command": ["/a"], "folders": []}]}', "unknown field"),
    ],
)
def test_an_invalid_programs_file_gives_one_clear_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "programs.json"
    path.write_text(text)
    with pytest.raises(StartError, match=says):
        read_programs_file(path)
