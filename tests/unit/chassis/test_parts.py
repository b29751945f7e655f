"""What is cut into parts of a bounded size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.parts import in_parts


@given(items=st.lists(st.binary(max_size=12)), size_max=st.integers(0, 20), items_max=st.integers(1, 5))
def test_parts_hold_all_in_order_and_only_one_that_is_alone_is_larger(
    items: list[bytes], size_max: int, items_max: int
) -> None:
    parts = list(in_parts(items, len, size_max=size_max, items_max=items_max))
    assert [item for part in parts for item in part] == items
    for part in parts:
        assert 1 <= len(part) <= items_max
        assert len(part) == 1 or sum(map(len, part)) <= size_max


def test_a_part_takes_what_still_fits() -> None:
    assert list(in_parts([b"ab", b"c", b"d", b"efgh", b""], len, size_max=4)) == [[b"ab", b"c", b"d"], [b"efgh", b""]]
    assert list(in_parts([], len, size_max=4)) == []
