"""Every command and every block of YAML and PromQL in the documents, and what tests do with each."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
PROSE = ("text", "mermaid")  # blocks that nobody types


class How(Enum):
    """What becomes of a piece."""

    HERE = "executed here"
    CLUSTER = "executed on the cluster"
    RELEASE = "executed by tests/cluster/test_release.py"
    PARSED = "parsed by the real program"
    NOT = "not runnable here"


@dataclass(frozen=True)
class Piece:
    """A command, or a block with its language."""

    page: str
    language: str  # "sh" for a command
    text: str

    @property
    def rule(self) -> "Rule | None":
        """The first rule that says what to do with it; None: nobody has said."""
        return next((rule for rule in RULES if rule.takes(self)), None)


@dataclass(frozen=True)
class Rule:
    """Pieces by language and by how they begin. `why`: for those that are not runnable here."""

    language: str
    pattern: str
    how: How
    why: str = ""

    def takes(self, piece: Piece) -> bool:
        """Whether it is about a piece."""
        return self.language == piece.language and re.match(self.pattern, piece.text) is not None


def _sh(pattern: str, how: How, why: str = "") -> Rule:
    return Rule("sh", pattern, how, why)


AGENT = r"gpu-node-agent "
RULES = (
    _sh(r"make image$|\.ci/(release publish --registry|sbom)|helm install gpu-node-agent oci:", How.RELEASE),
    _sh(r"make ", How.PARSED),
    _sh(r"\.ci/release publish", How.NOT, "publishes under names that nobody has given yet"),
    _sh(r"kind load", How.NOT, "kind needs a container engine"),
    _sh(r"docker ", How.NOT, "needs a container engine and a registry"),
    _sh(r"PYTHONPATH=\. \S+ -m pytest", How.NOT, "runs a part of this very suite"),
    _sh(r"vllm |FLAGS_", How.NOT, "needs the framework and a GPU"),
    _sh(r"openssl ", How.HERE),
    _sh(r"helm (install|upgrade)", How.PARSED),
    _sh(r"helm uninstall", How.CLUSTER),
    _sh(rf"{AGENT}check (--config|configmaps my-devices/|compat .*--driver)", How.HERE),
    _sh(rf"{AGENT}(status|top|explain|check (node|compat))", How.CLUSTER),
    _sh(rf"{AGENT}(run|try|check configmaps --cluster)", How.PARSED),
    _sh(r"kubectl .*(gpu-operator|clusterpolicies)", How.NOT, "needs NVIDIA's GPU operator"),
    _sh(r"kubectl get --raw .*-extender:", How.NOT, "test_install_extender.py asks there, with the extender"),
    _sh(r"kubectl .*logs job/", How.NOT, "the Job is there only after an uninstall that was refused"),
    _sh(r"for node in .*config/preflight.yaml", How.PARSED),
    _sh(
        r"kubectl .*-preflight|helm test",
        How.NOT,
        "needs nodes with a driver; see test_preflight.py",
    ),
    _sh(r"kubectl annotate pod trainer", How.NOT, "test_vgpu.py resizes a pod whose container runs"),
    _sh(r"kubectl ", How.CLUSTER),
    Rule("promql", "", How.HERE),
    Rule("yaml", "", How.PARSED),
)


def pieces() -> Iterator[Piece]:
    """All of them, page by page and in order; commands that `&&` joins one by one, without comments."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if language == "sh":
                yield from _commands(page.name, block.splitlines())
            elif language not in PROSE:
                yield Piece(page.name, language, block)
        without = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        joined = re.sub(r"\\\n\s*", " ", without)
        yield from _commands(page.name, (line for line in joined.splitlines() if re.match(r"    \S", line)))


def _commands(page: str, lines: "Iterator[str] | list[str]") -> Iterator[Piece]:
    for line in lines:
        words = re.split(r"(?:^|\s)#\s", line)[0]
        yield from (Piece(page, "sh", each.strip()) for each in words.split(" && ") if each.strip())
