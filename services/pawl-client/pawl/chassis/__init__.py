"""Infrastructure that clients and services share: channels, identities, ids, JSON, tasks and logs."""

import os

# Processes that fork here exec immediately. gRPC's fork handlers, on by default, would run first in the child and crash
# it during a call of the parent (this starts the embedded suite's database). gRPC reads the variable once, when it is
# first imported: grpc/grpc, doc/fork_support.md.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
