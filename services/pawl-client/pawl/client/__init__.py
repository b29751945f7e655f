"""The Python client for Pawl. It starts and watches runs, decides on calls, and runs front-end tools.

    with Client() as pawl:
        run = pawl.start("what is 17 * 23?")
        for piece in pawl.text(run.run_id):
            print(piece, end="", flush=True)

`AsyncClient` has the same methods for asyncio. Methods return protobuf messages (pawl.event.v1, pawl.agent.v1) and
raise exceptions from pawl.errors. See docs/reference/python-client.md.
"""

import pawl.chassis  # noqa: F401  # must be imported before gRPC
from pawl.chassis.process.start import StartError
from pawl.client.blocking import Client, SyncSession, SyncWorkflowRun
from pawl.client.client import AsyncClient
from pawl.client.decisions import answer, approve, edit, reject, result
from pawl.client.forms import file, form, image, output
from pawl.client.history import Sent
from pawl.client.jobs import JobHandle
from pawl.client.session import AsyncSession
from pawl.client.target import NoAnswer
from pawl.client.text import Piece
from pawl.client.workflows import WorkflowRun
from pawl.errors import PawlError

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "Client",
    "JobHandle",
    "NoAnswer",
    "PawlError",
    "Piece",
    "Sent",
    "StartError",
    "SyncSession",
    "SyncWorkflowRun",
    "WorkflowRun",
    "answer",
    "approve",
    "edit",
    "file",
    "form",
    "image",
    "output",
    "reject",
    "result",
]
