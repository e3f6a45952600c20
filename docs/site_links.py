"""The step of the site: links to files beside docs/, which a checkout has, are shown as text."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)\s]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show what such a link is about, without the link."""
    return _OUTSIDE.sub(r"\1", markdown)
