"""Templates: what they read, what they become, and what they may cost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.agent_loop.loop.rules.expression import ExpressionError
from pawl.agent_loop.workflows import expressions
from tests.tables import for_each

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
SCOPE: dict[str, Any] = {
    "input": {"count": 3, "price": 2.5, "name": "Ann", "in": 1},
    "nodes": {
        "fetch": {
            "output": {"lines": [{"text": "a"}, {"text": "bb"}], "size": 2**60, "none": None},
            "error": None,
            "state": "SUCCEEDED",
        },
        "late": {"output": None, "error": {"reason": "EXPIRED", "message": "late"}, "state": "FAILED"},
    },
    "run": {"id": "run_1", "user": "ann"},
    "index": 1,
}
VALUES: list[tuple[Any, Any]] = [
    ("plain", "plain"),
    ("${input.count}", 3),
    ("${ input.count }", 3),
    ("${input.count} of ${nodes.fetch.output.lines[1].text}", "3 of bb"),
    ("${nodes.fetch.output.lines}", [{"text": "a"}, {"text": "bb"}]),
    ("all: ${nodes.fetch.output.lines}", 'all: [{"text":"a"},{"text":"bb"}]'),
    ("${nodes.fetch.output.size}", 2**60),
    ("${input.in}", 1),
    ("$${input.count} $5 {x} ${input.name}$", "${input.count} $5 {x} Ann$"),
    (
        {"a": ["${input.name}", 1, None, True], "${input.name}": 1.5},
        {"a": ["Ann", 1, None, True], "${input.name}": 1.5},
    ),
    ("${input.count + 1}", 4),
    ("${input.price * 2.0}", 5.0),
    ("${double(input.count) * input.price}", 7.5),
    ("${index + 1}", 2),
    ("${size(nodes.fetch.output.lines) > 1}", True),
    ("${nodes.fetch.output.lines.map(line, line.text)}", ["a", "bb"]),
    ("${nodes.fetch.output.lines.filter(line, size(line.text) > 1)}", [{"text": "bb"}]),
    ("${nodes.late.output == null ? nodes.late.error.reason : 'fine'}", "EXPIRED"),
    ("${nodes.fetch.output.none == null && nodes.fetch.state == 'SUCCEEDED'}", True),
    ("${has(nodes.fetch.output.other) ? 1 : 2}", 2),
    ("${ {'name': input.name, 'end': '}'} }", {"name": "Ann", "end": "}"}),
    ('${"}" + input.name}', "}Ann"),
    ("${timestamp('2026-01-01T00:00:00Z') + duration('1h')}", "2026-01-01T01:00:00Z"),
    ("${input}", SCOPE["input"]),
]
FAILURES = [
    ("${nodes.fetch.output.other}", "nodes.fetch.output.other does not exist"),
    ("${nodes.fetch.output.lines[2]}", r"nodes.fetch.output.lines\[2\] does not exist"),
    ("${nodes.late.output.text}", "nodes.late.output.text does not exist"),
    ("${input.name[0]}", r"input.name\[0\] does not exist"),
    ("${size(nodes.fetch.output.other)}", "Key not found"),
    ("${input.price * 2}", r"write 2.0 instead of 2, or double\(x\)"),
    ("${1 / 0}", "divide by zero"),
    ("${input.count", "no closing brace"),
    ("${type(input)}", "type"),
]


@pytest.mark.parametrize("row", range(len(VALUES)), ids=[str(template) for template, _ in VALUES])
def test_a_template_renders_to_its_value(row: int) -> None:
    template, value = VALUES[row]
    found = expressions.render(template, SCOPE)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("template", "message"), FAILURES)
def test_a_failing_template_gives_the_reason(template: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        expressions.render(template, SCOPE)


@given(JSON)
def test_a_path_returns_its_value_unchanged_and_is_inserted_into_text(value: Any) -> None:
    assert expressions.render("${input}", {"input": value}) == value
    assert expressions.render(["a ${input.x[0]}"], {"input": {"x": [value]}}) == [
        f"a {value if isinstance(value, str) else expressions.render('${input} ', {'input': value})[:-1]}"
    ]


@given(st.text())
def test_any_text_can_be_written_as_a_literal(text: str) -> None:
    assert expressions.render(text.replace("${", "$${"), {}) == text


@given(st.text(st.sampled_from("${}'\" a.x\\rR[0]()"), max_size=30))
def test_any_template_is_rendered_or_refused(text: str) -> None:
    faults = expressions.check(text, {"a": None})
    try:
        expressions.render(text, {"a": {"x": [1]}})
    except ExpressionError:
        return
    assert not [fault for fault in faults if "does not exist" not in fault.message]


@for_each(
    ("template", "names"),
    [
        ("nodes.a.output", set()),
        ("$${nodes.a.output}", set()),
        ("${nodes.a.output} ${ nodes . b . state }", {"a", "b"}),
        ("${has(nodes.a.output.x) ? nodes.b.output.nodes.c : 'nodes.d'}", {"a", "b"}),
        ("${nodes.a.output.exists(nodes_x, nodes_x.nodes.e == 1)}", {"a"}),
        ("${input.nodes.a} ${input[nodes.b.output]}", {"b"}),
        ({"x": [{"y": "${nodes.a.output}"}], "z": 3}, {"a"}),
        ('${nodes.a.output + "\'" + nodes.b.output + "\'"}', {"a", "b"}),
        (r"${r'\' + nodes.a.output + r'\'}", {"a"}),
        ("${", set()),
    ],
)
def test_references_are_the_nodes_that_expressions_read(template: Any, names: set[str]) -> None:
    assert expressions.references(template) == names


def test_an_expression_reads_only_what_it_names() -> None:
    scope = {**SCOPE, "nodes": {**SCOPE["nodes"], "huge": {"output": {"text": "y" * 900_000, "count": 1}}}}
    rows = ["size(nodes.fetch.output.lines)", "nodes.huge.output.count + 1", "input.count + nodes.huge.output.count"]
    assert [expressions.render(f"${{{row}}}", scope) for row in rows] == [2, 2, 4]
    assert expressions.render("${size(nodes.huge.output.text)}", scope) == 900_000


NUMBERS = list(range(9000))


def test_an_expression_that_would_block_the_event_loop_is_refused() -> None:
    """The first rows are the largest values that are still evaluated, in up to 30 ms."""
    rows: list[tuple[Any, Any, bool]] = [
        ("${size(input.filter(x, x < 0)) == 0}", NUMBERS[:1000], True),
        ("${input.map(x, x)}", NUMBERS[:1000], True),
        ("${input.exists(x, x < 0)}", NUMBERS[:3000], True),
        ("${input == input}", NUMBERS[:8000], True),
        ("${size(input) > 3}", "y" * 900_000, True),
        ("${input.map(x, x)}", NUMBERS[:1200], False),
        ("${input.map(x, input)}", NUMBERS[:300], False),
        ("${input.map(x, [" + "x," * 300 + "x])}", [NUMBERS], False),
        ("${[" + "input," * 100 + "input]}", NUMBERS, False),
        ("${[" + "1," * 400 + "1].map(x, input)}", NUMBERS, False),
        ("${input" + " + input" * 20 + "}", NUMBERS, False),
        (["${size(input) > 3}"] * 2, "y" * 900_000, False),
        (["${input}"] * 2, "y" * 600_000, False),
        ("${input} " * 100, "y" * 20_000, False),
    ]
    for template, value, is_allowed in rows:
        if is_allowed:
            expressions.render(template, {"input": value})
            continue
        with pytest.raises(ExpressionError, match=r"too large|limit"):
            expressions.render(template, {"input": value})


def test_names_are_checked_whether_or_not_their_fields_are_known() -> None:
    names = {"event": None, "schedule": frozenset({"id"})}
    template = {"a": "${event.any.field} ${schedule.id} ${event.in}", "b": ["${schedule.time}"]}
    assert list(map(str, expressions.check(template, names, "input"))) == [
        "input.b[0]: schedule.time does not exist (known: id)"
    ]


@pytest.mark.parametrize("expression", ["1.0 / 0.0", "0.0 / 0.0", "[1.0 / 0.0]"])
def test_result_that_is_not_a_finite_number_is_an_error(expression: str) -> None:
    with pytest.raises(ExpressionError, match="finite"):
        expressions.render(f"${{{expression}}}", {"input": 1})
