"""Everything that the registry keeps in PostgreSQL."""
