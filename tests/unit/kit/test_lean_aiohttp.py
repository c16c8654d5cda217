"""aiohttp comes in without root certificates, and the environment is as before."""

import subprocess
import sys

import pytest

SCRIPT = """
import os
before = dict(os.environ)
import {module}
import sys
from aiohttp import connector
contexts = [connector._SSL_CONTEXT_VERIFIED, connector._SSL_CONTEXT_UNVERIFIED]
certificates = [context.cert_store_stats()["x509_ca"] for context in contexts]
print(certificates, dict(os.environ) == before, "frozenlist._frozenlist" in sys.modules)
"""


@pytest.mark.parametrize("module", ["agent.kit.lean_aiohttp", "agent.cluster.api", "agent.web.server"])
@pytest.mark.parametrize("named", [False, True])
def test_neither_root_certificates_nor_a_c_list_come_in(named: bool, module: str) -> None:
    environment = {"PATH": "/usr/bin:/bin"} | ({"SSL_CERT_FILE": "/somewhere.pem"} if named else {})
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{module}", module)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.stdout == "[0, 0] True False\n", ended.stderr
