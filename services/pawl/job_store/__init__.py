"""The ledger, which holds conversations, messages, runs, calls, events and each run's inbox.

The job store owns the PostgreSQL schema `job_store`, which no other service accesses. State changes follow the tables
in `ledger/rules/run_table.py` and `ledger/rules/call_table.py`. The worker's epoch fences every write of a worker. A
write is durable before it is acknowledged or published.
"""
