"""Labels: which there may be, and that they come back as they were, whatever stands in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.labels import LABELS_MAX, check_labels, has_all
from pawl.errors import InvalidField
from pawl.job_store.domain import labels as kept
from tests.tables import not_explained

ANN, BOB = (StoreId("acme"), UserId("ann")), (StoreId("acme"), UserId("bob"))

keys = st.from_regex(r"[a-z0-9][a-z0-9_.-]{0,62}", fullmatch=True).filter(lambda key: not key.startswith("pawl."))
values = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), max_size=64)
labelled = st.dictionaries(keys, values, max_size=LABELS_MAX)


@given(labelled, labelled)
def test_the_lines_of_a_thing_hold_those_that_are_sought_if_it_has_all_labels(
    labels: dict[str, str], wanted: dict[str, str]
) -> None:
    """As the index compares them, and for nobody else."""
    for sought in (wanted, dict(list(labels.items())[::2])):
        lines = set(kept.lines(*ANN, sought))
        assert (lines <= set(kept.lines(*ANN, labels))) == has_all(labels, sought)
        assert not sought or not lines <= set(kept.lines(*BOB, labels))


@given(st.dictionaries(st.text(max_size=70), st.text(max_size=300), max_size=20))
def test_what_passes_is_stored_whole_and_what_does_not_is_named(labels: dict[str, str]) -> None:
    try:
        assert kept.read(kept.written(*ANN, check_labels(labels, "here"))) == labels
    except InvalidField:
        with pytest.raises(InvalidField, match=r"^here: "):
            check_labels(labels, "here")


def test_a_label_that_cannot_be_is_refused_with_the_reason() -> None:
    rows = [(({key: "x"}), "another key") for key in ("", "Env", "-env", "a" * 64)]
    rows += [({"pawl.run": "x"}, "Pawl's own"), ({"env": "é" * 129}, "256 bytes")]
    rows += [({"env": "a\nb"}, "control character"), ({"env": "a\0b"}, "control character")]
    rows += [({"env": "a\u2028b"}, "line break")]
    assert not_explained(InvalidField, check_labels, rows) == []


def test_there_are_at_most_sixteen() -> None:
    most = {f"k{number}": "" for number in range(LABELS_MAX)}
    assert check_labels(most) == most
    with pytest.raises(InvalidField, match="at most 16 labels, and there are 17"):
        check_labels(most | {"k": ""})
