"""URLs as they may be shown."""

import re


def hide_password(url: str) -> str:
    """Without the password, which a URL can have before its host and in its query."""
    before_host = re.sub(r"(://[^:/?@]*):[^/?]*@", r"\1@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1...", before_host)
