"""Tools that check the links of a page and replace them."""

import re
from pathlib import Path
from urllib.parse import urljoin

import httpx2

from pawl.tools import Category, EffectClass, tool

PAGE = Path("site/page.html")


def answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=5, follow_redirects=True).is_success
    except httpx2.HTTPError:
        return False


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
def check_links(url: str) -> dict[str, list[str]]:
    """Return the links of the page at this URL, and which of them are broken."""
    links = re.findall(r'href="([^"]+)"', PAGE.read_text())
    return {"links": links, "broken": [link for link in links if not answers(urljoin(url, link))]}


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
def replace_link(old: str, new: str) -> str:
    """Replace a link in the page."""
    PAGE.write_text(PAGE.read_text().replace(old, new))
    return f"{old} is now {new}"
