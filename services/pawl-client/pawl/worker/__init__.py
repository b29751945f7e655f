"""Runs tools in your own process, attached to the tool registry.

    worker = Worker("127.0.0.1:7602", name="billing", api_key=...)

    @worker.tool(category="SAFE", effect="IDEMPOTENT")
    async def charge(amount: int, context: CallContext) -> dict[str, int]:
        '''Charge an amount.'''

    asyncio.run(worker.run())

See docs/guides/tools.md.
"""

import pawl.chassis  # noqa: F401  # before gRPC is imported
from pawl.worker.function import DID_NOT_HAPPEN, CallContext, OutcomeUnknown, Superseded, ToolError
from pawl.worker.worker import AttachError, Worker

__all__ = ["DID_NOT_HAPPEN", "AttachError", "CallContext", "OutcomeUnknown", "Superseded", "ToolError", "Worker"]
