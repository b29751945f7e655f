"""Stores tool definitions, checks calls against schemas and policy, and executes them.

Owns the PostgreSQL schema `tool_registry`: definitions, the execution journal, and the data of built-in tools.
Guarantees: a call runs only if its arguments fit the schema and every required approval was given; an AT_MOST_ONCE
call takes effect at most once; an execution whose outcome cannot be determined is reported as UNKNOWN.
"""
