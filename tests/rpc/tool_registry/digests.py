"""Digests of the audit, which need the secret of the conversation."""

from __future__ import annotations

import hashlib
import hmac

from pawl.chassis.db.database import Database


async def digest_of(database_url: str, content: bytes, key_id: str = "conversation") -> str:
    async with Database(database_url, application_name="test") as database:
        secret = await database.fetchval("SELECT secret FROM tool_registry.audit_keys WHERE key_id = $1", key_id)
    return hmac.digest(secret, hashlib.sha256(content).hexdigest().encode(), "sha256").hex()
