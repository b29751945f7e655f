"""The parts that every process needs and no service owns.

Server, channels, status mapping, authentication, health, logs, metrics,
settings, start and stop, database, bus, strict JSON, ids and clock. The chassis
knows no service; services hand it their servicers, checks and method names.
"""

import os

# Whoever forks here runs another program in the child at once. gRPC's own fork handlers, on by default, would run there
# first and crash it when the parent is in the middle of a call (the database of the embedded suite is started so).
# gRPC reads this once, when it is first imported: grpc/grpc, doc/fork_support.md.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
