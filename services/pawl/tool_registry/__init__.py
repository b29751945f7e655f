"""The hands: keeps tool definitions and versions, checks calls, and runs them.

Owns the PostgreSQL schema `tool_registry`: definitions, the journal of
executions, and the data of its built-in tools. Promises that a call runs only if
its arguments fit the schema and whoever must approve it has; that an
AT_MOST_ONCE call has its effect at most once; and that an outcome nobody knows
is said to be unknown.
"""
