"""Why a node or a cluster cannot be cleaned up."""


class CleanupFailed(Exception):
    """A clean-up failed and may be tried again; the text names cause and remedy."""


class CleanupRefused(CleanupFailed):
    """Pods prevent the clean-up: it cannot succeed before they have ended."""
