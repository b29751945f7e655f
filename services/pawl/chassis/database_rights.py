"""The rights of a service's role on a schema that another role owns: what it needs at work, and nothing more.

Granted at every start, so that they hold for new tables too. A role that has these rights, and no
other, reads and writes rows; of tables that only grow it reads and adds them. It makes, changes and drops nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pawl.chassis import logs

if TYPE_CHECKING:
    from pawl.chassis.database import Connection, Database

_SCHEMA_RIGHTS: Final = frozenset({"USAGE"})
_SEQUENCE_RIGHTS: Final = frozenset({"USAGE"})
_ROW_RIGHTS: Final = frozenset({"SELECT", "INSERT", "UPDATE", "DELETE"})
_GROWING_RIGHTS: Final = frozenset({"SELECT", "INSERT"})
_VERSION_RIGHTS: Final = frozenset({"SELECT"})
_SEQUENCE: Final = "S"

_HELD_ON_SCHEMA: Final = """
SELECT coalesce(array_agg(a.privilege_type) FILTER (WHERE a.grantee = $2::text::regrole), '{}')
FROM pg_namespace n LEFT JOIN LATERAL aclexplode(n.nspacl) a ON true WHERE n.nspname = $1
"""
_HELD: Final = """
SELECT c.relname AS name, c.relkind::text AS kind,
    coalesce(array_agg(a.privilege_type) FILTER (WHERE a.grantee = $2::text::regrole), '{}') AS held
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN LATERAL aclexplode(c.relacl) a ON true
WHERE n.nspname = $1 AND c.relkind IN ('r', 'p', 'S') GROUP BY c.oid, c.relname, c.relkind ORDER BY c.relname
"""
# Who owns the table, its schema or the database may do anything, or give himself the right to.
_CHANGEABLE: Final = """
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_database d ON d.datname = current_database()
WHERE n.nspname = $1 AND c.relname = ANY ($2::text[]) AND (
    has_table_privilege(c.oid, 'DELETE, TRUNCATE, TRIGGER') OR has_any_column_privilege(c.oid, 'UPDATE')
    OR pg_has_role(c.relowner, 'MEMBER') OR pg_has_role(n.nspowner, 'MEMBER') OR pg_has_role(d.datdba, 'MEMBER'))
ORDER BY c.relname
"""

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """The role of a service, and the tables to which it only adds rows."""

    role: str
    append_only: frozenset[str] = frozenset()

    def on_table(self, table: str) -> frozenset[str]:
        """Return the rights that the role has on a table."""
        if table == "schema_version":
            return _VERSION_RIGHTS
        return _GROWING_RIGHTS if table in self.append_only else _ROW_RIGHTS


async def give(connection: Connection, schema: str, rights: Rights) -> None:
    """Give the role its rights on `schema`, and take away others; idempotent, all or nothing.

    The connection is that of the owner. What is right already is left alone. If the
    role itself is the owner, nothing happens.
    """
    role = _quoted(rights.role)
    async with connection.transaction():
        if await connection.fetchval("SELECT current_user") == rights.role:
            return
        held = frozenset(await connection.fetchval(_HELD_ON_SCHEMA, schema, role))
        changed = await _settle(connection, f"SCHEMA {schema}", role, held=held, wanted=_SCHEMA_RIGHTS)
        for row in await connection.fetch(_HELD, schema, role):
            is_sequence = row["kind"] == _SEQUENCE
            wanted = _SEQUENCE_RIGHTS if is_sequence else rights.on_table(row["name"])
            what = f"{'SEQUENCE' if is_sequence else 'TABLE'} {schema}.{_quoted(row['name'])}"
            changed |= await _settle(connection, what, role, held=frozenset(row["held"]), wanted=wanted)
    if changed:
        _log.info("database.rights_given", schema=schema, role=rights.role)


async def role_of(database: Database) -> str:
    """Return the role of the sessions of this pool."""
    return str(await database.fetchval("SELECT current_user"))


async def changeable(database: Database, schema: str, tables: Collection[str]) -> list[str]:
    """Return those of the tables whose rows the role of this pool could change or remove, or have changed."""
    return [row["relname"] for row in await database.fetch(_CHANGEABLE, schema, list(tables))]


async def _settle(
    connection: Connection, what: str, role: str, *, held: frozenset[str], wanted: frozenset[str]
) -> bool:
    if held == wanted:
        return False
    await connection.execute(f"REVOKE ALL ON {what} FROM {role}")
    await connection.execute(f"GRANT {', '.join(sorted(wanted))} ON {what} TO {role}")
    return True


def _quoted(name: str) -> str:
    """Return a name as PostgreSQL reads it in a statement."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'
