"""Import this before anything of aiohttp: it brings the package in without the system's root certificates.

aiohttp reads them twice at import, for its two default TLS contexts: 0.15 s and 2 MiB for contexts that
nobody here uses. Whoever speaks TLS through aiohttp passes a context of its own, as kubernetes-asyncio
does with the cluster's authority; a connection that forgets to is refused, since nothing is trusted.
"""

import importlib
import os

_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")  # see OpenSSL's SSL_CTX_set_default_verify_paths(3)


def _import() -> None:
    saved = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(dict.fromkeys(_VARIABLES, os.devnull))
    try:
        importlib.import_module("aiohttp")
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_import()
