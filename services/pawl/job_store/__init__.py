"""The ledger: conversations, messages, runs, calls, events and the inbox of each run.

Owns the PostgreSQL schema `job_store`; nobody else touches it. Promises: state
moves only along the tables of `domain/run_table.py` and `domain/call_table.py`;
every write of a worker is fenced by its epoch; what is acknowledged is durable,
and nothing is shown before it is.
"""
