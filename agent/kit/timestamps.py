"""Times as Kubernetes writes them."""

import datetime as dt


def now() -> str:
    """The present time in RFC 3339, to the second, in UTC."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
