"""`pawl apply`: order, ownership and convergence, against a store in memory that can fail at any write."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from graphlib import CycleError
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from pawl.cli.declared import applying, files, rules
from pawl.cli.declared.applying import ApplyError
from pawl.cli.declared.kinds import KINDS, references
from pawl.cli.declared.rules import Action, Key, Owner
from pawl.cli.failure import CommandError
from pawl.event.v1.agent_pb2 import AgentDefinition
from pawl.event.v1.schedule_pb2 import ScheduleDefinition
from pawl.notify.v1 import channel_pb2
from pawl.settings.v1 import settings_pb2
from pawl.tool.v1 import rule_pb2, source_pb2
from tests.unit.cli.declared_store import Store

TYPES = {kind: each.definition for kind, each in KINDS.items()}
NAMES = st.sampled_from("abcd")
KEYS = st.builds(Key, st.sampled_from(rules.KINDS), NAMES)
SOME = st.sets(KEYS)
SETS = st.sampled_from(["mine", "theirs"])


def written(folder: Path, contents: Mapping[str, str], name: str = "mine") -> Path:
    for old in folder.glob("*/*.yaml"):
        old.unlink()
    for file, text in {"pawl.yaml": f"name: {name}\n", **contents}.items():
        (folder / file).parent.mkdir(exist_ok=True, parents=True)
        (folder / file).write_text(text)
    return folder


async def applied(store: Store, folder: Path, **options: bool) -> list[str]:
    found: Any = store
    return [line async for line in applying.apply(found, applying.read([folder], **options))]


CLERK = {
    "agents/clerk.yaml": "name: clerk\ndelegates_to: [counter]\n",
    "agents/counter.yaml": "name: counter\noptions:\n  instructions: Count.\n",
    "schedules/daily.yaml": "name: daily\ntext: report\nagent: clerk\ncron: '0 9 * * *'\n",
}


@given(st.dictionaries(KEYS, st.sets(KEYS)))
def test_a_resource_comes_after_the_resources_to_which_it_refers(graph: dict[Key, set[Key]]) -> None:
    try:
        order = rules.ordered(graph)
    except CycleError:
        return
    assert sorted(order) == sorted(graph)
    for key, others in graph.items():
        assert all(order.index(other) <= order.index(key) for other in others if other in graph)


@given(SOME, SOME, SOME, st.dictionaries(KEYS, SETS), st.tuples(st.booleans(), st.booleans()))
def test_steps_touch_only_resources_that_the_set_owns_or_adopts(
    wanted: set[Key], changed: set[Key], existing: set[Key], sets: dict[Key, str], options: tuple[bool, bool]
) -> None:
    adopts, prunes = options
    owners = {key: Owner(name, 3) for key, name in sets.items()}
    order = [
        key
        for key in sorted(wanted)
        if not rules.refusal(key, owners.get(key), "mine", exists=key in existing, adopts=adopts)
    ]
    for step in rules.steps(order, changed, existing, owners, "mine", prunes=prunes):
        owner = owners.get(step.key)
        assert step.version == (owner.version if owner else 0)
        is_own = owner is not None and owner.set_name == "mine"
        if step.action is Action.DELETE:
            assert prunes
            assert is_own
            assert step.key not in wanted
        else:
            assert step.key in wanted
            assert adopts or is_own or (owner is None and step.key not in existing)
            assert step.claims or (step.action is Action.KEEP and is_own), "every write has its declaration"


@settings(max_examples=30)
@given(st.integers(0, 6), st.integers(0, 14))
def test_applying_again_after_a_crash_converges(first: int, second: int) -> None:
    async def play(folder: Path) -> None:
        store = Store()
        for contents, writes in ((CLERK, first), ({"agents/counter.yaml": "name: counter\n"}, second)):
            written(folder, contents)
            store.writes_left = writes
            with suppress(ApplyError):
                await applied(store, folder, prune=True)
            store.writes_left = 10**6
            await applied(store, folder, prune=True)
        assert list(store.agents) == ["counter"]
        assert not store.schedules
        assert list(store.owners) == [Key("agent", "counter")]
        store.writes.clear()
        assert await applied(store, folder, prune=True) == ["counter: unchanged"]
        assert not store.writes

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))


async def test_resources_are_created_in_order_and_deleted_only_with_prune(tmp_path: Path) -> None:
    store = Store()
    await applied(store, written(tmp_path, CLERK))
    assert [each for each in store.writes if "owner" not in each] == ["agent counter", "agent clerk", "schedule daily"]
    written(tmp_path, {"agents/counter.yaml": CLERK["agents/counter.yaml"]})
    lines = await applied(store, tmp_path)
    assert lines[-1] == "  warning: no file declares schedule daily, clerk; use --prune to delete them"
    planned = await applied(store, tmp_path, prune=True, dry_run=True)
    assert [part for part in ("schedule daily: deleted", "  -text: report") if part not in planned] == []
    assert set(store.agents) == {"clerk", "counter"}
    await applied(store, tmp_path, prune=True)
    assert (set(store.agents), store.schedules, len(store.owners)) == ({"counter"}, {}, 1)


async def test_a_plan_shows_only_changes_made_in_the_files(tmp_path: Path) -> None:
    store = Store()
    await applied(store, written(tmp_path, {"agents/clerk.yaml": "name: clerk\n"}))
    planned = await applied(store, written(tmp_path, CLERK), dry_run=True)
    assert "  +- counter" in planned
    assert "  -# tool: add" not in planned, "clerk cannot be validated with its new delegate yet"


async def test_nothing_changes_if_any_file_is_invalid(tmp_path: Path) -> None:
    store = Store()
    bad = CLERK | {
        "agents/bad.yaml": "name: bad\n---\nname: worse\noptions:\n  model: m\ndelegates_to:\n- nobody\n",
        "schedules/typo.yaml": "name: typo\ntext: x\nagent: clark\n",
    }
    with pytest.raises(ApplyError) as refused:
        await applied(store, written(tmp_path, bad))
    assert str(refused.value).splitlines() == [
        f"{tmp_path}/agents/bad.yaml:6: delegates_to: there is no agent 'nobody' (AGENT_NOT_FOUND)",
        f"{tmp_path}/schedules/typo.yaml:3: agent: there is no agent 'clark' (AGENT_NOT_FOUND)",
    ]
    assert refused.value.may_pass, "another set may create these agents"
    assert not store.writes


async def test_settings_that_only_the_deployment_may_change_are_refused_with_file_and_line(tmp_path: Path) -> None:
    store = Store()
    asked = {"settings/all.yaml": "limits: {active_runs: 3}\nlayer: DEPLOYMENT\n"}
    asked |= {"settings/own.yaml": "layer: STORE\nlimits: {active_runs: 3}\nswitches:\n  runs: {state: off}\n"}
    with pytest.raises(ApplyError) as refused:
        await applied(store, written(tmp_path, asked))
    found = [problem.partition(": ")[0] for problem in str(refused.value).splitlines()]
    assert found == [f"{tmp_path}/settings/all.yaml:2", f"{tmp_path}/settings/own.yaml:3"]
    assert not store.writes
    await applied(store, written(tmp_path, {"settings/own.yaml": "layer: STORE\nlimits: {active_runs: 3}\n"}))
    await applied(store, written(tmp_path, {"settings/own.yaml": "layer: STORE\nlimits: {background_runs: 4}\n"}))
    assert dict(store.limits) == {"background_runs": 4}, "a file has all values of its layer"
    assert await applied(store, tmp_path) == ["settings store: unchanged"]


async def test_new_channels_are_counted_together(tmp_path: Path) -> None:
    store = Store()
    store.channels.append(channel_pb2.Channel(name="old", url="https://example.com/"))
    two = {f"channels/{name}.yaml": f"name: {name}\nurl: https://example.com/\n" for name in ("one", "two")}
    with pytest.raises(ApplyError, match=r"two\.yaml.*at most 2 channels"):
        await applied(store, written(tmp_path, two))
    assert not store.writes


async def test_resources_of_others_are_refused_unless_they_are_adopted(tmp_path: Path) -> None:
    store = Store()
    store.agents["counter"] = AgentDefinition(name="counter")
    await applied(store, written(tmp_path / "theirs", {"agents/clerk.yaml": "name: clerk\n"}, "theirs"))
    mine = written(tmp_path / "mine", CLERK)
    store.writes.clear()
    with pytest.raises(ApplyError) as refused:
        await applied(store, mine)
    assert [
        part
        for part in (
            "agent 'counter' exists and belongs to no set; add --adopt",
            "agent 'clerk' belongs to the set 'theirs'; add --adopt",
        )
        if part not in str(refused.value)
    ] == []
    assert not store.writes
    await applied(store, mine, adopt=True)
    assert {each.set for each in store.owners.values()} == {"mine"}
    for path in (tmp_path / "theirs", mine / "agents" / "clerk.yaml"):
        with pytest.raises(ApplyError, match="belongs to the set 'mine'"):
            await applied(store, path)


async def test_a_second_applier_gets_a_conflict_that_names_the_agent_and_user(tmp_path: Path) -> None:
    folder, store = written(tmp_path, CLERK), Store()
    first, second = (applying.apply(store, applying.read([folder])) for _ in range(2))  # type: ignore[arg-type]
    assert await anext(first) == "counter: version 1"
    await anext(second)
    async for _ in first:
        pass
    with pytest.raises(ApplyError, match=r"agent 'clerk' failed: the agent 'clerk' was changed by bob \(CONFLICT\)"):
        async for _ in second:
            pass


def read(folder: Path, contents: Mapping[str, str]) -> tuple[Mapping[Key, Any], list[str]]:
    found, problems = files.read([written(folder, contents)], TYPES)
    return {each.key: each.definition for each in found}, [problem.replace(f"{folder}/", "") for problem in problems]


TRIAGE = {
    "workflows/outer.yaml": "name: outer\nnodes:\n  sub: {kind: workflow, workflow: triage}\n",
    "workflows/triage.yaml": "name: triage\nnodes:\n  ask:\n    kind: agent\n    agent: clerk\n    task: Sort.\n",
    "agents/clerk.yaml": "name: clerk\n",
    "schedules/daily.yaml": "name: daily\nworkflow: outer\ninput: {a: 1}\ncron: '0 9 * * *'\n",
}


async def test_a_workflow_is_saved_after_the_resources_that_its_nodes_name(tmp_path: Path) -> None:
    store = Store()
    lines = await applied(store, written(tmp_path, TRIAGE))
    saved = [write for write in store.writes if not write.startswith("owner")]
    assert saved == ["agent clerk", "workflow triage", "workflow outer", "schedule daily"], lines
    assert store.schedules["daily"].input_json == b'{"a":1}'
    assert all(line.endswith(": unchanged") for line in await applied(store, tmp_path))


async def test_the_faults_of_a_workflow_are_reported_with_their_lines(tmp_path: Path) -> None:
    without_agent = {name: text for name, text in TRIAGE.items() if not name.startswith("agents")}
    with pytest.raises(ApplyError) as error:
        await applied(Store(), written(tmp_path, without_agent))
    where = tmp_path / "workflows/triage.yaml"
    assert str(error.value) == f"{where}:5: nodes.ask.agent: there is no agent 'clerk' (make it)"


def test_yes_and_no_as_answer_options_are_not_read_as_booleans(tmp_path: Path) -> None:
    text = "name: w\nnodes:\n  ask: {kind: human, question: Go, options: [yes, no, on], days: [2026-01-01, true]}\n"
    found, problems = read(tmp_path, {"workflows/w.yaml": text})
    ask = found[Key("workflow", "w")]["nodes"]["ask"]
    assert (problems, ask["options"], ask["days"]) == ([], ["yes", "no", "on"], ["2026-01-01", True])


def test_every_problem_is_reported_with_its_file_and_line(tmp_path: Path) -> None:
    _, problems = read(
        tmp_path,
        {
            "agents/a.yaml": "name: a\noptions:\n  model: x\n  instruction: typo\n---\nname: a\n",
            "rules/b.yaml": "\n- list\n",
            "schedules/c.yaml": "name: [",
            "triggers/d.yaml": "name: d\nname: e\n",
            "sources/e.yaml": "kind: nonsense\nname: e\n",
        },
    )
    assert [problem.partition(": ")[0] for problem in problems] == [
        "sources/e.yaml:1",
        "agents/a.yaml:4",
        "rules/b.yaml:2",
        "schedules/c.yaml:1",
        "triggers/d.yaml:2",
    ]


BOMB = "name: a\nlabels: {a: &a [b], b: [*a]}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: a\ntext: 2020-13-45\n", "1: invalid value: month must be in 1..12"),
        ("name: a\ntext: !!bool maybe\n", "1: invalid value: 'maybe'"),
        ("name: a\nx: {y: 1, ? [b] : c}\n", "2: not valid YAML: a key must be text"),
        ("kind: [agent]\nname: a\n", "1: kind must be one of "),
        (BOMB, "2: not valid YAML: aliases are not supported"),
        (f"name: a\nlabels: {'[' * 200}{']' * 200}\n", "2: not valid YAML: nested more than 100 levels deep"),
        ("name: a\ncolour: red\n", "2: unknown field 'colour': remove it, or correct its name"),
        (
            "name: a\noptions:\n  instruction: red\n",
            "3: unknown field 'options.instruction': did you mean 'instructions'?",
        ),
        ("name: a\noptions: 3\n", "2: options must be a mapping of names to values, got 3"),
        ("name: a\noptions:\n  temperature: hot\n", "3: options.temperature must be a number, got 'hot'"),
        ("name: a\noptions:\n  without_tools: 1\n", "3: options.without_tools must be true or false, got 1"),
        ("name: a\noptions:\n  instructions: 5\n", "3: options.instructions must be text; put it in quotes, got 5"),
        ("name: a\noptions:\n  reasoning_effort: big\n", "3: options.reasoning_effort must be one of HIGH, "),
        (
            "name: a\noptions:\n  limits:\n    rounds_max: 1.5\n",
            "4: options.limits.rounds_max must be a whole number from 0",
        ),
        ("name: a\ntools:\n  names: check\n", "3: tools.names must be a list, got 'check'"),
        ("name: a\ntools:\n  names: [x, 2]\n", "3: tools.names[1] must be text; put it in quotes, got 2"),
    ],
)
def test_an_invalid_value_is_reported_with_its_file_and_line(text: str, problem: str, tmp_path: Path) -> None:
    (reported,) = read(tmp_path, {"agents/a.yaml": text})[1]
    assert problem in reported.removeprefix("agents/a.yaml:"), reported


def test_faults_of_a_workflow_are_sorted_by_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("name: a\nnodes:\n  b: {kind: tol}\n  a: {kind: wait}\n")
    ((asked,), problems) = files.read([file], {"workflow": dict})
    assert not problems
    found = asked.faults([("nodes.a", "late"), ("nodes.b.kind", "early"), ("", "first")])
    assert found == [f"{file}:1: first", f"{file}:3: nodes.b.kind: early", f"{file}:4: nodes.a: late"]


def test_secret_values_are_refused(tmp_path: Path) -> None:
    _, problems = read(
        tmp_path,
        {
            "sources/shop.yaml": "name: shop\nmcp_http:\n  url: https://ann:pw@shop.example\n  headers:\n"
            "    accept: text/plain\n    X-Api-Key: abc\n  secret_headers:\n    authorization: shop-token\n",
            "channels/hook.yaml": "name: hook\nurl: https://a.example\nsecret: whsec_0123456789\n",
        },
    )
    assert [problem.partition("; ")[0] for problem in problems] == [
        "sources/shop.yaml:3: url looks like a secret's value",
        "sources/shop.yaml:6: X-Api-Key looks like a secret's value",
        "channels/hook.yaml:3: unknown field 'secret': remove it, or correct its name",
    ]


# The stubs do not know that a dict is good for a message.
Rule: Any = rule_pb2.Rule
SourceConfig: Any = source_pb2.SourceConfig
Timed: Any = ScheduleDefinition
TO: Any = {"argument": "to", "equals_json": b'"a"'}
ENDPOINT: Any = {"url": "https://x.example", "arguments_schema_json": b'{"type":"object"}'}
RUNS: Any = {"state": 3, "percent": 10}
FILES: Iterable[tuple[str, Message]] = (
    ("rule", Rule(name="r", effect=2, scope=4, tool_name="send_email", arguments=[TO])),
    ("source", SourceConfig(name="s", http_endpoint=ENDPOINT)),
    ("source", SourceConfig(name="s", open_api={"document": b"openapi: 3.0.0"})),
    (
        "settings",
        settings_pb2.Settings(
            layer=settings_pb2.SETTINGS_LAYER_DEPLOYMENT, switches={"runs": RUNS}, limits={"active_runs": 9}
        ),
    ),
    ("agent", AgentDefinition(name="a", daily_tokens_max=2**53, labels={"b": "1", "a": "2"})),
    ("schedule", Timed(name="s", workflow="w", input_json=b'{"a":1}')),
    ("schedule", Timed(name="s", text="two\nlines", interval_seconds=60, start_time={"seconds": 10})),
)


@pytest.mark.parametrize(("kind", "definition"), FILES)
def test_a_file_that_was_written_reads_back_the_same(kind: str, definition: Any, tmp_path: Path) -> None:
    text = files.to_yaml(kind, definition, ["tool: x"])
    key = Key(kind, "deployment" if kind == "settings" else definition.name)
    assert read(tmp_path, {f"{rules.folder(kind)}/x.yaml": text}) == ({key: definition}, []), text
    assert "'9'" not in text, "numbers are not text"


def test_enums_may_be_short_and_times_plain(tmp_path: Path) -> None:
    text = "name: r\neffect: ask\nscope: STORE\ntool_name: shop.*\nexpire_time: 2030-01-01T00:00:00Z\n"
    found, problems = read(tmp_path, {"rules/r.yaml": text})
    rule = found[Key("rule", "r")]
    assert (problems, rule.effect, rule.scope, rule.expire_time.seconds) == ([], 2, 4, 1893456000)
    assert references(Key("rule", "r"), rule) == {Key("source", "shop")}


@pytest.mark.parametrize("kind", sorted(TYPES.keys() - {"workflow", "settings"}))
def test_written_enums_are_short(kind: str, tmp_path: Path) -> None:
    """Unless the short name would be ambiguous or is the default."""
    for field in TYPES[kind].DESCRIPTOR.fields:
        for value in field.enum_type.values if field.enum_type is not None else ():
            one = [value.number] if field.is_repeated else value.number
            text = files.to_yaml(kind, TYPES[kind](name="x", **{field.name: one}))
            assert not value.number or value.name not in text, text
            found, problems = read(tmp_path, {f"{kind}s/x.yaml": text})
            assert (problems, getattr(found[Key(kind, "x")], field.name)) == ([], one)


def test_secrets_are_exported_as_names() -> None:
    source = SourceConfig(name="shop", mcp_http={"url": "u", "headers": {"Authorization": "x", "accept": "y"}})
    exported = {"url": "u", "headers": {"accept": "y"}, "secret_headers": {"Authorization": "shop-authorization"}}
    assert files.without_secrets("shop", source) == ["shop-authorization"]
    assert source == SourceConfig(name="shop", mcp_http=exported)


async def test_each_resource_is_exported_to_its_own_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(applying, "KINDS", {"agent": KINDS["agent"]})
    found: Any = Store()
    names = ("a b", "a/b", "a_b", "ü" * 200)
    found.agents = {name: AgentDefinition(name=name) for name in names}
    first, *_ = [line async for line in applying.export(found, tmp_path, "mine")]
    assert first == f"set mine: {tmp_path}/pawl.yaml"
    read, problems = files.read([tmp_path], TYPES)
    assert (sorted(each.key.name for each in read), problems) == (sorted(names), [])


@pytest.mark.parametrize(
    ("content", "path", "prune", "says"),
    [
        ({"pawl.yaml": "name: a b\n"}, "", False, "must contain only `name: NAME`"),
        ({"x.yaml": "name: x\n"}, "x.yaml", True, "--prune need a folder"),
        ({"pawl.yaml": "name: a\n", "schedule/x.yaml": "name: x\n"}, "", True, "did you mean schedules"),
        ({"agents/x.yaml": "name: x\n"}, "", False, "also needs a pawl.yaml"),
        ({"x.txt": "name: x\n"}, "", False, "File names must end with"),
    ],
)
def test_a_set_is_a_single_folder_with_a_name_and_known_subfolders(
    tmp_path: Path, content: dict[str, str], path: str, prune: bool, says: str
) -> None:
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(CommandError, match=says):
        applying.read([tmp_path / path], prune=prune)


async def test_an_exported_set_can_be_applied_again_by_the_same_caller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ceiling of the store, which the caller may read but not change, is left out."""
    monkeypatch.setattr(applying, "KINDS", {"settings": KINDS["settings"]})
    store = Store()
    store.limits, store.ceiling = {"active_runs": 3}, {"active_runs": 9}
    found: Any = store
    files = [line async for line in applying.export(found, tmp_path, "mine") if line.startswith("settings ")]
    assert files == [f"settings store: {tmp_path}/settings/store.yaml"]
    assert await applied(store, tmp_path, adopt=True) == ["settings store: adopted"]
