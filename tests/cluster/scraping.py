"""Scrapes of the agent from its own network, with the token of an account or without."""

import base64
import json
import subprocess
import sys
from pathlib import Path

from tests.cluster.installation import NAMESPACE, RELEASE
from tests.cluster.pki import Authority
from tests.cluster.rig import Cluster

SECRET, PORT = "gpu-agent-tls", 9447
SCRIPT = """
import json, ssl, sys, urllib.error, urllib.request
url, authority, token = sys.argv[1:]
context = ssl.create_default_context(cafile=authority) if authority else None
request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token} if token else {})
try:
    with urllib.request.urlopen(request, timeout=10, context=context) as answer:
        print(json.dumps([answer.status, answer.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
"""


def token(cluster: Cluster, name: str) -> str:
    """A new account of the default namespace, and a token of it."""
    about = {"name": name, "namespace": "default"}
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about})
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
    path = f"/api/v1/namespaces/default/serviceaccounts/{name}/token"
    return str(cluster.api.request("POST", path, request)["status"]["token"])


def certificate(cluster: Cluster, folder: Path) -> Path:
    """The agents' certificate as a Secret of the release's namespace; the authority that signed it."""
    authority = Authority(folder / "pki")
    authority.create()
    names = f"DNS:{RELEASE}.{NAMESPACE}.svc,IP:127.0.0.1"
    authority.sign("tls", "/CN=gpu-node-agent", usage="serverAuth", alternatives=names)
    files = {
        "ca.crt": authority.certificate,
        **{key: authority.folder / key for key in ("tls.crt", "tls.key")},
    }
    data = {name: base64.b64encode(path.read_bytes()).decode() for name, path in files.items()}
    metadata = {"name": SECRET, "namespace": NAMESPACE}
    cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
    return authority.certificate


def scrape(cluster: Cluster, url: str, authority: Path | None = None, bearer: str = "") -> tuple[int, str]:
    """Status and text; 0 and the reason where there is no answer."""
    argv = [sys.executable, "-c", SCRIPT, url, str(authority or ""), bearer]
    done = subprocess.run(cluster.reaching_api(argv), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        return 0, done.stderr[-300:]
    status, text = json.loads(done.stdout)
    return status, text
