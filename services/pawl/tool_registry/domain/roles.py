"""Roles of users, as their credentials name them."""

from __future__ import annotations

from typing import Final

ADMIN: Final = "admin"
APPROVER: Final = "approver"
MEMBER: Final = "member"
OPERATOR: Final = "operator"
WORKER: Final = "worker"
