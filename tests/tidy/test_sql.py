"""SQL belongs in the `store` module of a feature and in schema.sql (docs/design/decisions)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy import tree

STATEMENT = re.compile(r"\s*(?:SELECT|INSERT INTO|UPDATE|DELETE FROM|WITH|CREATE|ALTER|DROP|TRUNCATE|LOCK|VALUES)\s")
# Modules that open databases, create and check schemas; and the embedded PostgreSQL.
BESIDE_STORES = ("chassis/db/", "launcher/postgres.py")


def test_sql_is_only_in_store_modules() -> None:
    modules = (path for path in tree.python("services") if not _may_hold_statements(path))
    assert [f"{tree.name(path)}:{line}" for path in modules for line in _statements(path)] == []


def _may_hold_statements(path: Path) -> bool:
    inside = path.relative_to(tree.PAWL)
    return "store" in inside.with_suffix("").parts or inside.as_posix().startswith(BESIDE_STORES)


def _statements(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Constant(value=str(text)) if STATEMENT.match(text):
                yield node.lineno
