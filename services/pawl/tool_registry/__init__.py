"""Stores tool definitions, checks calls against schemas and policy, and executes them.

The tool registry owns the PostgreSQL schema `tool_registry`, which contains definitions, the execution journal, and the
data of built-in tools. It makes three guarantees. A call runs only if its arguments match the schema and it has every
required approval. An AT_MOST_ONCE call takes effect at most once. An execution whose outcome cannot be determined is
reported as UNKNOWN.
"""
