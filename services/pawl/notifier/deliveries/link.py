"""Links to the gateway: to the pages that show what people are told of, and to that which ends e-mails."""

from __future__ import annotations

from pawl.chassis.ids import StoreId
from pawl.notifier.inbox.rules import Draft


def link_to(draft: Draft, public_url: str) -> str:
    """Return the address of the page on which a browser sees the call or the run of a draft; empty if there is none.

    Without `public_url`, under which browsers reach the gateway, there is none.
    """
    if not public_url:
        return ""
    if draft.call_id:
        return f"{public_url}/inbox?call={draft.call_id}"
    return f"{public_url}/runs/{draft.run_id}" if draft.run_id else ""


def unsubscribe_link(public_url: str, store_id: StoreId, token: str) -> str:
    """Return the address of the page that ends e-mails of a channel; empty without `public_url`."""
    return f"{public_url}/unsubscribe/{store_id}/{token}" if public_url else ""
