"""The addresses: who is let in by what, which pages may read what they answer, and webhooks as they come in."""

from __future__ import annotations

from pawl.agent.v1.trigger_pb2 import DeliverWebhookRequest
from pawl.agent.v1.whoami_pb2 import WhoAmIResponse

SEAL = "s" * 32
HOST = "pawl.example.com"
PAGE = "https://app.example.com"
BEARER = {"authorization": "Bearer key"}
ANY = {"threadId": "t", "runId": "r", "messages": []}
WHO = "/rpc/pawl.agent.v1.AgentService/WhoAmI"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


class Channel:
    """A channel to services of which only WhoAmI answers, UnsubscribeChannel, and webhooks if `webhooks` is a list.

    It notes how long calls may take.
    """

    def __init__(self) -> None:
        self.timeouts: list[float] = []
        self.webhooks: list[DeliverWebhookRequest] | None = None
        self.who = WhoAmIResponse()
        self.links = {"good": True, "bad": False}
