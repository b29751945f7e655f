"""The brain: drives agent runs, and serves their users.

Owns nothing durable. Workers claim runs from the ledger, call the model, check
and run calls through the registry, and commit each step; the public API writes
messages, decisions and results as commands, and streams the log.

Promises: any replica serves any client and drives any run; it can be killed at
any time. What was acknowledged is in the ledger; a run whose worker died is gone
on with by another one, from its last step.
"""

import pawl.chassis  # noqa: F401  # before gRPC is imported
