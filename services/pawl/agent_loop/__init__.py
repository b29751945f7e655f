"""The agent loop, which drives agent runs and serves their users.

It owns no durable state. Workers claim runs from the ledger, call the model, check and run tool calls through the
registry, and commit each step. The public API writes messages, decisions and results to the ledger as commands, and
streams run events.

Any replica can serve any client and drive any run, and can be killed at any time. Every acknowledged
request is in the ledger. If a worker dies, another worker continues its runs from the last committed step.
"""

import pawl.chassis  # noqa: F401  # before gRPC is imported
