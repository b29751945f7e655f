"""What the notifier can be told."""

from __future__ import annotations

from pydantic import Field

from services.chassis.settings import ServiceSettings


class NotifierSettings(ServiceSettings):
    """See `.env.example`."""

    notifications_keep_days: float = Field(default=30.0, gt=0)
