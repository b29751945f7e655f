"""The ledger, which holds conversations, messages, runs, calls, events and each run's inbox.

The job store owns the PostgreSQL schema `job_store`, which no other service accesses. Runs and calls change state only
as allowed by the tables in `ledger/rules/run_table.py` and `ledger/rules/call_table.py`. Every write by a worker is
fenced by the worker's epoch. A write is durable before it is acknowledged or published.
"""
