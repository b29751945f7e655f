"""The ledger: conversations, messages, runs, calls, events and the inbox of each run.

Owns the PostgreSQL schema `job_store`; nobody else touches it. Promises: state
moves only along the tables of `ledger/rules/run_table.py` and `ledger/rules/call_table.py`;
every write of a worker is fenced by its epoch; what is acknowledged is durable,
and nothing is shown before it is.
"""
