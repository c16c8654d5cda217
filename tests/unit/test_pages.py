"""Pages agree with each other: what two of them say comes from one source, and remedies stand once."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from agent.app.build_telemetry import HTTPS_LIMITS
from agent.extender.app import PLAIN_LIMITS, TLS_LIMITS
from agent.extender.settings import ExtenderSettings
from agent.model.cuda import CLIENT_CEILINGS
from agent.model.modes import Mode
from agent.modes.desired import LONGEST_SETTLING_SECONDS, SPACING_SECONDS
from agent.modes.planner import FIRST_SECONDS, LONGEST_SECONDS
from agent.modes.switcher import RETRY_LOOK_SECONDS
from agent.mps.connections import HOST_SECONDS
from agent.mps.daemon_logs import LARGE_BYTES
from agent.mps.shared_memory import LOG_BYTES
from agent.node.withdrawal import STOP_SECONDS, SWITCH
from agent.settings import Settings
from agent.vgpu.limits import MOST_OF_FEW
from agent.vgpu.watch import CONTEXT_BYTES, END_READINGS, LEAST_TOLERANCE, REFUSED_READINGS, TOLERANCE_RATIO
from agent.web.connections import HEAD_SECONDS, ConnectionLimits
from agent.web.server import ANSWER_SECONDS
from tests.unit.test_docs import CHART, ROOT, has, spans

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
AGENT, EXTENDER = Settings(), ExtenderSettings()
NEWER, OLDER, _ = (most for _, _, most in CLIENT_CEILINGS)  # clients of MPS, by driver
PLAIN = ConnectionLimits()
SPOKEN = {1.0: "a second", 1800.0: "half an hour"}
BLOCK = Mode.VGPU.row.pair.block_bytes >> 20 if Mode.VGPU.row.pair else 0


def text(page: str) -> str:
    """A page with its lines joined."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def mib(size: int) -> int:
    return size >> 20


# Sentences as they must stand on each of these pages, with their figures from the code.
FACTS: dict[str, tuple[str, ...]] = {
    "docs/security.md": (
        (
            f"the agent holds {PLAIN.connections} (9446; {PLAIN.connections_per_address} of one address; "
            f"{HTTPS_LIMITS.connections} and {HTTPS_LIMITS.connections_per_address} on 9447)"
        ),
        (
            f"the extender {PLAIN_LIMITS.connections:,} ({EXTENDER.http.port}; "
            f"{PLAIN_LIMITS.connections_per_address} of one address; "
            f"{TLS_LIMITS.connections} and {TLS_LIMITS.connections_per_address} on 3457)"
        ),
        (
            f"({PLAIN.requests} and {PLAIN.requests_per_address} of one address, on 9447 "
            f"{HTTPS_LIMITS.requests} and {HTTPS_LIMITS.requests_per_address}; extender "
            f"{PLAIN_LIMITS.requests} and {PLAIN_LIMITS.requests_per_address}, on 3457 "
            f"{TLS_LIMITS.requests} and {TLS_LIMITS.requests_per_address}"
        ),
        f"has {HEAD_SECONDS:g} s, its answer {ANSWER_SECONDS:g} s",
        f"every client that reaches port {AGENT.http.port}",
        f"{mib(MOST_OF_FEW)} MiB at most; half of a cap",
        # The policies guard what they guard in the chart.
        "of the node's pods the chosen GPUs, `gpu-node-agent.io/limits` and",
        "`tencent.com/predicate-*`, `tencent.com/gpu-assigned` and `gpu-node-agent.io/limits` are written",
    ),
    "docs/names.md": (f"{AGENT.http.port}; {EXTENDER.http.port}; 9447", "its HTTPS port 3457"),
    "docs/vgpu.md": (
        f"by more than {mib(LEAST_TOLERANCE)} MiB and {TOLERANCE_RATIO:.0%}".replace("%", " %"),
        f"above its cap for {END_READINGS} samples, by more than {mib(LEAST_TOLERANCE)} MiB",
        f"and {mib(CONTEXT_BYTES)} MiB for each of up to eight processes",
        f"limits for {REFUSED_READINGS} samples",
        f"| {BLOCK} MiB | floor(memory /",
        f"| `{AGENT.vgpu.enforcement}` (default) |",
        f"| `{AGENT.vgpu.compute}` (default) | none",
        f"| `{AGENT.vgpu.placement}` (default) |",
    ),
    "docs/mps.md": (
        f"{OLDER} clients per GPU ({NEWER} with drivers for CUDA 13.1)",
        f"({AGENT.mps.shared_memory_mebibytes}) for all pods",
        f"a tmpfs of {mib(LOG_BYTES)} MiB. A log above {mib(LARGE_BYTES)} MiB is emptied",
        f"root on the node has {HOST_SECONDS:g} s",
    ),
    "docs/developers.md": (
        f"({OLDER}, or {NEWER} with newer drivers)",
        f"1 % of a GPU; {BLOCK} MiB",
    ),
    "docs/modes.md": (
        (
            f"{SWITCH.taint:g} s for the taint, {SWITCH.next_served:g} s for each bound pod and "
            f"{SWITCH.all_served / 60:g} minutes for all ({SWITCH.unheld:g} s where"
        ),
        f"{SWITCH.arrived:g} s for the kubelet, {SWITCH.patched:g} s for the patch",
        (
            f"within {STOP_SECONDS:g} s (`terminationGracePeriodSeconds` of at least "
            f"{VALUES['terminationGracePeriodSeconds']})"
        ),
        f"| `{AGENT.when_busy}` (default) | idle GPUs switch at once",
        f"within {SPOKEN[SPACING_SECONDS]} waits until it is stable ({LONGEST_SETTLING_SECONDS:g} s at most)",
        (
            f"the next try is after {FIRST_SECONDS:g} s at first, then up to {SPOKEN[LONGEST_SECONDS]}, "
            f"within {RETRY_LOOK_SECONDS:g} s when a possible cause changed"
        ),
    ),
    "docs/decisions.md": (
        f"{mib(MOST_OF_FEW)} MiB until three have spoken",
        f"**Failed set-ups back off together**, {FIRST_SECONDS:g} s to {SPOKEN[LONGEST_SECONDS]}",
    ),
    "docs/health.md": (f"(every {AGENT.health.probe_seconds:g} s, `config.health.probeSeconds`",),
    "docs/injection.md": ("(1.29) and runtime (containerd 2.0, CRI-O 1.23) support CDI",),
}
# The same names in other words.
SAME = {
    "docs/mps.md": "(kubelet 1.29, containerd 2.0, CRI-O 1.23)",
    "SECURITY.md": "ValidatingAdmissionPolicy (1.30)",
    "docs/security.md": "(Kubernetes 1.30 and newer",
    "README.md": "(1.30 for the policies",
}


@pytest.mark.parametrize("page", FACTS)
def test_pages_agree(page: str) -> None:
    """Defaults, names and timings that stand on more than one page are those of the program."""
    found = text(page)
    assert not [sentence for sentence in FACTS[page] if sentence not in found]


def test_versions_are_the_same_on_all_pages() -> None:
    assert not [page for page, words in SAME.items() if words not in text(page)]


# The chart's values have the agent's own configuration below `config`; administrators write values.
OF_THE_PROGRAM = {"decisions.md", "architecture.md", "style.md", "metrics.md"}
ADMINISTRATORS = sorted(each for each in (ROOT / "docs").glob("*.md") if each.name not in OF_THE_PROGRAM)


def short(document: Path) -> Iterator[str]:
    """Keys of the agent's configuration that are written without the chart's `config.`"""
    agent, extender = msgspec.to_builtins(AGENT), msgspec.to_builtins(EXTENDER)
    by_extender = document.name == "extender.md"  # which has a configuration of its own
    for span in spans(document):
        written = re.match(r"([a-z]\w*(?:\.[a-zA-Z]\w*)+)(?=$|[:= ])", span)
        path = written[1].split(".") if written else []
        if path and not has(VALUES, path) and has(agent, path) and not (by_extender and has(extender, path)):
            yield ".".join(path)


@pytest.mark.parametrize("document", ADMINISTRATORS, ids=lambda path: path.name)
def test_values_are_named_by_their_full_path(document: Path) -> None:
    """A reader can copy them into values.yaml: `config.vgpu.enforcement`, not `vgpu.enforcement`."""
    assert not set(short(document))


def test_each_error_of_cuda_has_one_remedy() -> None:
    """In one table, by number and message; the other pages link it."""
    page = (ROOT / "docs" / "developers.md").read_text()
    (table,) = re.findall(r"^\| code \| message \|.*\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = re.findall(r"^\| (\d[\d, ]*) \| `", table, re.MULTILINE)
    codes = [int(each) for row in rows for each in row.split(",")]
    assert {214, 802, 803, 807} <= set(codes)
    assert sorted(set(codes)) == codes
    others = [each for each in (ROOT / "docs").glob("*.md") if each.name != "developers.md"]
    for other in others:
        for row in re.findall(r"^\|.*\bCUDA errors? \d.*\|$", other.read_text(), re.MULTILINE):
            assert "developers.md#" in row, f"{other.name}: {row}"


def test_no_page_promises_an_event_to_every_pod_that_waits() -> None:
    """A refused pod has one; a pod that waits only with the extender (or while its daemon starts)."""
    for page in ("README.md", "docs/developers.md"):
        for sentence in re.split(r"(?<=[.:]) ", text(page)):
            if re.search(r"pods? that waits?\b.*\bevent", sentence):
                assert "extender" in sentence, f"{page}: {sentence}"


def test_a_removed_label_keeps_the_agent_until_it_has_cleaned_up() -> None:
    """No page says that it may be gone before; the chart keeps it there by the label of the mode in force."""
    for page in (*(ROOT / "docs").glob("*.md"), CHART / "templates" / "NOTES.txt"):
        assert not re.search(r"take the agent away before", page.read_text()), page.name
    required = VALUES["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    expressions = [each for term in required["nodeSelectorTerms"] for each in term["matchExpressions"]]
    assert {"key": "gpu-node-agent.io/mode", "operator": "Exists"} in expressions
    assert "`gpu-node-agent.io/mode` keeps it on the node until then" in text("docs/modes.md")


def test_mps_is_for_nobody_who_is_not_trusted() -> None:
    """Three pages speak of tenants who do not trust each other: none offers them MPS."""
    assert "Neither isolates tenants who [do not trust each other]" in text("docs/developers.md")
    assert "Keep tenants who do not trust each other on GPUs of their own" in text("SECURITY.md")
    assert "**MPS is for pods that trust each other**; give others GPUs of their own." in text("docs/mps.md")


def test_the_readme_takes_as_long_as_contributing_says() -> None:
    """`make demo` and `make test`: their durations stand on both pages."""
    took = dict(
        re.findall(
            r"^\| `make (demo|test)` \| .+ \| ([^|]+) \|$",
            (ROOT / "CONTRIBUTING.md").read_text(),
            re.MULTILINE,
        )
    )
    assert took["demo"] == "20 s"
    assert "simulated 8-GPU machine, twenty seconds" in text("README.md")
    assert int(took["test"].removesuffix(" min")) <= 10
    assert "all that needs no cluster; under ten minutes" in text("README.md")
