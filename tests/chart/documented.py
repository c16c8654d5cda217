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
    """The way in which a piece is tested."""

    HERE = "executed here"
    CLUSTER = "executed on the cluster"
    ELSEWHERE = "executed by another test, which reads the page, too"
    PARSED = "parsed by the real program"
    NOT = "not runnable here"


@dataclass(frozen=True)
class Piece:
    """A command, or a block with its language."""

    page: str
    heading: str
    language: str  # "sh" for a command
    text: str

    @property
    def rule(self) -> "Rule | None":
        """The first rule that says what to do with it; None: nobody has said."""
        return next((rule for rule in RULES if rule.takes(self)), None)


@dataclass(frozen=True)
class Rule:
    """Pieces by language, how they begin and where they stand, as `page: heading`; the first one counts.

    `why`: for those that are not runnable here.
    """

    language: str
    pattern: str
    how: How
    why: str = ""
    where: str = ""

    def takes(self, piece: Piece) -> bool:
        """Whether it is about a piece."""
        return (
            self.language == piece.language
            and re.match(self.pattern, piece.text) is not None
            and re.match(self.where, f"{piece.page}: {piece.heading}") is not None
        )


def _sh(pattern: str, how: How, why: str = "", where: str = "") -> Rule:
    return Rule("sh", pattern, how, why, where)


AGENT = r"gpu-node-agent "
RULES = (
    _sh(r"(lspci|nvidia-|reboot|systemctl)", How.NOT, "changes a machine", where="driver.md: "),
    # tests/cluster/test_documented_commands.py, test_first_hour_is_true
    _sh(r"kubectl ", How.ELSEWHERE, where="first-hour.md: "),
    # tests/cluster/test_kubectl_gpu.py
    _sh(r"kubectl (gpu |create clusterrolebinding team-)", How.ELSEWHERE),
    _sh(r"kubectl -n gpu-node-agent get configmap gpu-node-agent-kubectl", How.ELSEWHERE),
    _sh(
        r"sudo install -m 755 ~/kubectl(-|_complete-)gpu",
        How.NOT,
        "it changes the machine that runs the tests",
    ),
    # tests/cluster/test_release.py and test_install.py
    _sh(
        r"make image$|\.ci/(release publish --registry|sbom)|helm install gpu-node-agent oci:", How.ELSEWHERE
    ),
    _sh(r"kubectl ", How.ELSEWHERE, where=r"migration.md: "),  # tests/cluster/test_install.py
    _sh(r"make ", How.PARSED),
    _sh(r"\.ci/release publish", How.NOT, "publishes under names that nobody has given yet"),
    _sh(r"kind load", How.NOT, "kind needs a container engine"),
    _sh(r"docker ", How.NOT, "needs a container engine and a registry"),
    _sh(r"PYTHONPATH=\. \S+ -m pytest", How.NOT, "runs a part of this very suite"),
    _sh(r"vllm |FLAGS_", How.NOT, "needs the framework and a GPU"),
    _sh(r"openssl ", How.HERE),
    _sh(r"helm (install|upgrade)", How.PARSED),
    _sh(r"helm uninstall", How.NOT, "test_install.py uninstalls, with a shorter time limit"),
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
    # tests/component/monitoring/test_names_of_others.py
    Rule("csv", "EndTimestamp,", How.ELSEWHERE),
)


_PARTS = re.compile(
    r"^```(?P<language>\w*)\n(?P<block>(?s:.*?))^```|^#+ (?P<heading>.+)$"
    r"|(?P<lines>^ {4}\S.*\n(?:^ {4,}\S.*\n)*)",
    re.MULTILINE,
)


def pieces() -> Iterator[Piece]:
    """All of them, page by page and in order; commands that `&&` joins one by one, without comments."""
    for page in PAGES:
        heading = ""
        for part in _PARTS.finditer(page.read_text(encoding="utf-8")):
            heading = part["heading"] or heading
            if part["lines"] or part["language"] == "sh":
                yield from _commands(page.name, heading, part["lines"] or part["block"])
            elif part["block"] and part["language"] not in PROSE:
                yield Piece(page.name, heading, part["language"], part["block"])


def _commands(page: str, heading: str, text: str) -> Iterator[Piece]:
    # A line that is further indented belongs to the one before.
    for line in re.sub(r"\\?\n {5,}", " ", text).splitlines():
        words = re.split(r"(?:^|\s)#\s", line)[0]
        yield from (Piece(page, heading, "sh", each.strip()) for each in words.split(" && ") if each.strip())
