"""aiohttp comes in without root certificates, and the environment is as before."""

import subprocess
import sys

import pytest

SCRIPT = """
import os
before = dict(os.environ)
import {module}
from aiohttp import connector
contexts = [connector._SSL_CONTEXT_VERIFIED, connector._SSL_CONTEXT_UNVERIFIED]
print([context.cert_store_stats()["x509_ca"] for context in contexts], dict(os.environ) == before)
"""


@pytest.mark.parametrize("module", ["agent.web.server", "agent.app"])
@pytest.mark.parametrize("named", [False, True])
def test_no_root_certificates_are_read(module: str, named: bool) -> None:
    environment = {"PATH": "/usr/bin:/bin"} | ({"SSL_CERT_FILE": "/somewhere.pem"} if named else {})
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(module=module)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.stdout == "[0, 0] True\n", ended.stderr
