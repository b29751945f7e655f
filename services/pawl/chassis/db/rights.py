"""The rights of a service's role on a schema that another role owns: what it needs at work, and nothing more.

Granted at every start, so that they hold for new tables too. A role that has these rights, and no
other, reads and writes rows; of tables that only grow it reads and adds them. It makes, changes and drops nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pawl.chassis.db.database import Connection, Database

_GRANT: Final = """
REVOKE ALL ON SCHEMA {schema} FROM {role};
REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {role};
REVOKE ALL ON ALL SEQUENCES IN SCHEMA {schema} FROM {role};
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role};
REVOKE INSERT, UPDATE, DELETE ON {schema}.schema_version FROM {role}
"""
_PROTECT: Final = "REVOKE UPDATE, DELETE ON {table} FROM {role}"
# Who owns the table, its schema or the database may do anything, or give himself the right to.
_CHANGEABLE: Final = """
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_database d ON d.datname = current_database()
WHERE n.nspname = $1 AND c.relname = ANY ($2::text[]) AND (
    has_table_privilege(c.oid, 'DELETE, TRUNCATE, TRIGGER') OR has_any_column_privilege(c.oid, 'UPDATE')
    OR pg_has_role(c.relowner, 'MEMBER') OR pg_has_role(n.nspowner, 'MEMBER') OR pg_has_role(d.datdba, 'MEMBER'))
ORDER BY c.relname
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """The role of a service, and the tables to which it only adds rows."""

    role: str
    append_only: frozenset[str] = frozenset()


async def give(connection: Connection, schema: str, rights: Rights) -> None:
    """Give the role its rights on `schema`, and take away others; idempotent, all or nothing.

    The connection is that of the owner. If the role itself is the owner, nothing happens.
    """
    if await connection.fetchval("SELECT current_user") == rights.role:
        return
    role = '"{}"'.format(rights.role.replace('"', '""'))
    async with connection.transaction():
        await connection.execute(_GRANT.format(schema=schema, role=role))
        for table in rights.append_only:
            await connection.execute(_PROTECT.format(table=f"{schema}.{table}", role=role))


async def role_of(database: Database) -> str:
    """Return the role of the sessions of this pool."""
    return str(await database.fetchval("SELECT current_user"))


async def changeable(database: Database, schema: str, tables: Collection[str]) -> list[str]:
    """Return those of the tables whose rows the role of this pool could change or remove, or have changed."""
    return [row["relname"] for row in await database.fetch(_CHANGEABLE, schema, list(tables))]
