"""Privileges of a service's role on a schema that another role owns.

The privileges are granted at every start, so that they cover new tables. The role can read and write rows. In
append-only tables, it can only read and insert rows. It cannot create, alter or drop anything.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pawl.server.db.database import Connection, Database

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
# The owner of the table, its schema or the database can do anything, or can grant itself the right to.
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
    role: str
    append_only: frozenset[str] = frozenset()


async def give(connection: Connection, schema: str, rights: Rights) -> None:
    """Grant the role its privileges on `schema` and revoke all others. Idempotent and atomic.

    The connection must belong to the owner. If the role itself is the owner, nothing changes.
    """
    if await connection.fetchval("SELECT current_user") == rights.role:
        return
    role = '"{}"'.format(rights.role.replace('"', '""'))
    async with connection.transaction():
        await connection.execute(_GRANT.format(schema=schema, role=role))
        for table in rights.append_only:
            await connection.execute(_PROTECT.format(table=f"{schema}.{table}", role=role))


async def role_of(database: Database) -> str:
    return str(await database.fetchval("SELECT current_user"))


async def changeable(database: Database, schema: str, tables: Collection[str]) -> list[str]:
    return [row["relname"] for row in await database.fetch(_CHANGEABLE, schema, list(tables))]
