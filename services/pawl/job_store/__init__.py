"""The ledger: conversations, messages, runs, calls, events and the inbox of each run.

The job store owns the PostgreSQL schema `job_store`; no other service accesses it. State changes only along the tables
of `ledger/rules/run_table.py` and `ledger/rules/call_table.py`. Every write of a worker is fenced by its epoch. A write
is durable before it is acknowledged or published.
"""
