"""Certificates of the cluster, made with openssl (at least 3.0), and the kubeconfig files that carry them."""

import base64
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.waiting import RigError

DAYS = "2"
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
"""Elliptic keys: an RSA key takes as long to make as all of these together."""


def _openssl(*arguments: str) -> None:
    done = subprocess.run(
        ["openssl", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode != 0:
        raise RigError(f"openssl {arguments[0]}: exit code {done.returncode}: {done.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority in `folder`, which also holds every certificate that it signs."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    def create(self) -> None:
        """Make the authority and the key pair that signs service account tokens."""
        self.folder.mkdir(mode=0o700)
        key, certificate = str(self.folder / "ca.key"), str(self.certificate)
        subject = ("-subj", "/CN=test-cluster", "-days", DAYS)
        _openssl("req", "-x509", *CURVE, "-keyout", key, "-out", certificate, *subject)
        tokens, public = str(self.folder / "tokens.key"), str(self.folder / "tokens.pub")
        _openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", tokens)
        _openssl("pkey", "-in", tokens, "-pubout", "-out", public)

    def sign(self, name: str, subject: str, *, usage: str, alternatives: str = "") -> None:
        """Make `name.key` and `name.crt`. `usage`: clientAuth or serverAuth; `alternatives`: the SAN."""
        extensions = ["-addext", "keyUsage=digitalSignature", "-addext", f"extendedKeyUsage={usage}"]
        extensions += ["-addext", "basicConstraints=critical,CA:FALSE"]
        if alternatives:
            extensions += ["-addext", f"subjectAltName={alternatives}"]
        signer = ("-CA", str(self.certificate), "-CAkey", str(self.folder / "ca.key"), "-days", DAYS)
        files = ("-keyout", str(self.folder / f"{name}.key"), "-out", str(self.folder / f"{name}.crt"))
        _openssl("req", "-x509", *CURVE, *files, "-subj", subject, *signer, *extensions)

    def kubeconfig(self, name: str, server: str) -> Path:
        """Write `name.kubeconfig` beside the signed certificate `name`; `server` is the API server's URL."""

        def data(file: str) -> str:
            return base64.b64encode((self.folder / file).read_bytes()).decode()

        user = {"client-certificate-data": data(f"{name}.crt"), "client-key-data": data(f"{name}.key")}
        cluster = {"server": server, "certificate-authority-data": data("ca.crt")}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(content))  # YAML is a superset of JSON
        return path
