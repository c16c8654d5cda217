"""Take aiohttp from here: it comes in without what nobody here uses.

The system's root certificates: aiohttp reads them twice at import, 0.15 s and 2 MiB for the two default TLS
contexts of its client. A caller that speaks TLS through aiohttp passes its own context, as kubernetes-asyncio
does with the cluster's authority; a connection that forgets to is refused, since nothing is trusted.

frozenlist's C part: it alone brings libstdc++ into the process, 1.2 MiB, to speed up a list of signal
handlers that is read once a request.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLES = {
    "SSL_CERT_FILE": os.devnull,  # see OpenSSL's SSL_CTX_set_default_verify_paths(3)
    "SSL_CERT_DIR": os.devnull,
    "FROZENLIST_NO_EXTENSIONS": "1",  # frozenlist's own switch
}


@contextmanager
def _environment() -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(_VARIABLES)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


with _environment():
    import aiohttp

__all__ = ["aiohttp"]
