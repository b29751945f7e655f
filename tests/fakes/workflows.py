"""Stores workflow versions in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pawl.agent_loop.workflows import definition as definitions
from pawl.agent_loop.workflows import parsing
from pawl.chassis.ids import StoreId
from pawl.errors import WorkflowNotFound
from pawl.event.v1 import workflow_pb2


@dataclass
class MemoryWorkflows:
    versions: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def save(self, name: str, nodes: dict[str, Any], **more: Any) -> int:
        """Validate and save a version. Return its number."""
        version = self.newest(name) + 1
        definition = parsing.parse(json.dumps({"name": name, "nodes": nodes, **more}).encode())
        self.versions[name, version] = definitions.encode(definition)
        return version

    def newest(self, name: str) -> int:
        return max((version for known, version in self.versions if known == name), default=0)

    async def get(self, store_id: StoreId, name: str, version: int) -> workflow_pb2.WorkflowVersion:
        found = version or self.newest(name)
        if (name, found) not in self.versions:
            raise WorkflowNotFound
        return workflow_pb2.WorkflowVersion(
            name=name,
            version=found,
            definition_json=self.versions[name, found],
        )
