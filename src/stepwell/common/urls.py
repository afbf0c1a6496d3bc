"""URLs as they may be shown."""

import re


def hide_password(url: str) -> str:
    """The URL without the password, which it can have before its host and in its query."""
    before_host = re.sub(r"(://[^:/?@]*):[^/?]*@", r"\1@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1...", before_host)
