"""The documents: links lead somewhere; verbs, commands, paths, metrics and keys that they name exist."""

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from agent.cli import main as cli
from agent.extender.metrics import ExtenderMetrics
from agent.extender.settings import ExtenderSettings
from agent.node.capacity import EFFECT, TAINT
from agent.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
AT_THE_TOP = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
DOCUMENTS = [README, *(ROOT / name for name in AT_THE_TOP), *sorted((ROOT / "docs").glob("*.md"))]
CHART = ROOT / "charts" / "gpu-node-agent"

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def spans(document: Path) -> Iterator[str]:
    """Code within the text, and lines of code blocks without their comments."""
    text = document.read_text(encoding="utf-8")
    for block in re.findall(r"^```[a-z]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from (line.split("  #")[0].strip() for line in block.splitlines())
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"`([^`\n]+)`", text)
    indented = re.sub(r"\\\n\s*", "", text)  # continued lines are one
    yield from (line.split("  #")[0].strip() for line in indented.splitlines() if line.startswith("    "))


def anchors(document: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_document
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", document.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file = document.parent / target if target else document
        assert file.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{document.name} links to {target}#{anchor}"


@every_document
def test_tables_are_whole(document: Path) -> None:
    """Each begins with its head: an empty line among the rows would end it there."""
    lines = ["", *document.read_text(encoding="utf-8").splitlines(), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert after.startswith("| ---"), f"{document.name}: {line[:80]}"


@every_document
def test_files_that_are_named_exist(document: Path) -> None:
    for span in spans(document):
        for path in re.findall(r"(?<![\w/-])(?:agent|charts|config|docs|tests|proto|\.ci)/[\w./-]+\b", span):
            assert (ROOT / path).exists() or (CHART / path).exists(), f"{document.name} names {path}"


@every_document
def test_verbs_are_those_of_make(document: Path) -> None:
    verbs = {verb for span in spans(document) for verb in re.findall(r"\bmake ([a-z][a-z-]*)", span)}
    if document == README:
        assert {"demo", "test", "image"} <= verbs
    for verb in verbs:
        subprocess.run(["make", "--dry-run", verb], cwd=ROOT, check=True, capture_output=True, timeout=30)


def test_make_help_names_every_verb() -> None:
    text = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    for verb in (
        *("check", "demo", "test", "test-long", "test-cluster", "test-peers", "test-gpu", "bench"),
        *("lint", "format", "proto", "docs", "image", "chart", "lock", "clean"),
    ):
        assert re.search(rf"^{verb}\b|\b{verb} ", text, re.MULTILINE), verb


def test_the_readme_is_short_and_in_order() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 130
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == [
        *("Two commands without a GPU", "What works, and how it was tried", "kind in two commands"),
        *("Install", "One pod for each mode", "How it compares", "Links"),
    ]
    assert (
        text.index("GPUs sit idle")
        < text.index("![")
        < text.index("Status: ")
        < text.index("## Two commands")
    )


def test_every_page_is_linked_from_the_readme() -> None:
    """Or, of the pages that `make test-gpu` writes, from the one on what they measure."""
    text = README.read_text()
    for page in (ROOT / "docs").glob("*.md"):
        subject, _, of_hardware = page.name.partition("-on-")
        if of_hardware:
            assert f"]({page.name}" in (page.parent / f"{subject}.md").read_text(), page.name
        else:
            assert f"](docs/{page.name}" in text, page.name


def parts_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The commands of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found: Mapping[str, argparse.ArgumentParser] = action.choices
            return found
    return {}


@every_document
def test_commands_and_their_flags_exist(document: Path) -> None:
    for span in spans(document):
        # In a shell line of another program (kubectl exec ... -- gpu-node-agent ...), what comes after it.
        command = re.search(r"(?:^|-- )gpu-node-agent ([a-z][^#|;]*)", span)
        if command is None:
            continue
        parser, words = cli._parser(), command[1].split()
        while words and (parts := parts_of(parser)):
            if words[0].startswith("-") or not words[0].isascii():
                break
            if words[0] not in parts:
                assert words[0] == "my-devices/" or document.name == "CHANGELOG.md", (
                    f"{document.name}: {span}"
                )
                break
            parser = parts[words.pop(0)]
        flags = {text for action in parser._actions for text in action.option_strings}
        for word in words:
            if word.startswith("--"):
                assert word.strip("[]").split("=")[0] in flags, f"{document.name}: {span}"


def test_metrics_exist() -> None:
    extender = ExtenderMetrics()
    known = set(re.findall(r"gpu_agent_\w+", (ROOT / "docs" / "metrics.md").read_text()))
    known |= {
        family.name + ("_total" if family.type == "counter" else "")
        for family in (*extender.registry.collect(), *extender.ledger.describe())
    }
    rules = "".join(file.read_text() for file in (CHART / "files" / "rules").glob("*.yaml"))
    known |= set(re.findall(r"gpu_agent_\w+", rules))
    for document in DOCUMENTS:
        for span in spans(document):
            for name, star in re.findall(r"\b(gpu_agent_\w+)(\*?)", span):
                fits = any(each.startswith(name) for each in known) if star else name in known
                assert fits, f"{document.name} names {name}{star}"


AMBIGUOUS = ("kubelet.sock", "driver.root", "attribution")


def trees() -> list[dict[str, Any]]:
    """Every key that there is: the agent's, the chart's with the agent's below `config`, the extender's."""
    agent: dict[str, Any] = msgspec.to_builtins(Settings())
    extender: dict[str, Any] = msgspec.to_builtins(ExtenderSettings())
    chart: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return [
        agent,
        {**chart, "config": agent, "extender": {**chart["extender"], "config": extender}},
        extender,
    ]


def has(tree: Any, path: list[str]) -> bool:
    """Whether a document has a key; what is below one that is empty by default is anybody's."""
    if not path or path[0] == "*":
        return True
    if not isinstance(tree, dict):
        return False
    return not tree or (path[0] in tree and has(tree[path[0]], path[1:]))


@every_document
def test_keys_of_configuration_and_chart_exist(document: Path) -> None:
    known = trees()
    first = {key for tree in known for key in tree}
    for span in spans(document):
        written = re.match(r"(?:--set(?:-\w+)? )?([a-z]\w*(?:\.(?:\w+|\*|\{[\w,]+\}))+)(?=$|[:= \[])", span)
        if not written or written[1].split(".")[0] not in first or written[1] in AMBIGUOUS:
            continue
        head, _, choice = written[1].partition("{")
        for last in choice.rstrip("}").split(",") if choice else [""]:
            path = f"{head}{last}".split(".")
            assert any(has(tree, path) for tree in known), f"{document.name} names {'.'.join(path)}"


def test_keys_and_commands_that_do_not_exist_would_show(tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    for text, test in (
        ("`vgpu.placment: spread`", test_keys_of_configuration_and_chart_exist),
        ("`http.{address,prot}`", test_keys_of_configuration_and_chart_exist),
        ("`gpu-node-agent stauts`", test_commands_and_their_flags_exist),
        ("    gpu-node-agent release --until 10m", test_commands_and_their_flags_exist),
        ("see [x](#nowhere)", test_links_lead_somewhere),
        ("`docs/nowhere.md`", test_files_that_are_named_exist),
    ):
        document.write_text(text)
        with pytest.raises(AssertionError):
            test(document)


def test_there_is_one_example_pod_for_each_mode() -> None:
    text = README.read_text()
    asked = {}
    for file in sorted((ROOT / "config" / "examples" / "pods").glob("*.yaml")):
        (pod,) = yaml.safe_load_all(file.read_text())
        assert pod["kind"] == "Pod"
        assert pod["metadata"]["name"] == file.stem
        assert f"config/examples/pods/{file.name}" in text
        asked[file.stem] = set(pod["spec"]["containers"][0]["resources"]["limits"])
    assert asked == {
        "whole": {"nvidia.com/gpu"},
        "fraction": {"tencent.com/vcuda-core", "tencent.com/vcuda-memory"},
        "share": {"nvidia.com/mps-core", "nvidia.com/mps-memory"},
    }
    for word in ("pgpu", "vgpu", "mps"):
        assert f"`{word}`" in text


# Messages of other programs; and the gaps in messages.
OTHERS = {
    'attribution="estimated"',
    "kubectl apply",
    "helm uninstall",
    "nvidia-smi",
    "UnexpectedAdmissionError",
}
GAPS = re.compile(r"\.\.\.|: |\bN\b|Xid \d+|\d+\.\d+")


def test_messages_that_are_explained_are_the_agent_s() -> None:
    sources = "".join(
        re.sub(r'"\s*\n\s*f?"', "", file.read_text())
        for folder, ending in ((ROOT / "agent", "py"), (CHART / "templates", "*"))
        for file in folder.rglob(f"*.{ending}")
    )
    sources = " ".join(sources.split())
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = [
        cell
        for heading in ("### When /readyz is not ready", "## The most frequent")
        for line in text[text.index(heading) :].split("\n\n")[1].splitlines()[2:]
        for cell in re.findall(r"`([^`]+)`", line.split("|")[1])
        if cell not in OTHERS
    ]
    assert len(rows) > 15
    for message in rows:
        pieces = [piece.strip(" :.,;") for piece in GAPS.split(message)]
        assert any(piece in sources for piece in pieces if len(piece) > 7), message


# How reasons of events begin; and words of other programs that begin like that.
REASON = re.compile(
    r"(GPU|Mode|MPS|MIG|Limits|Allocation|Placement|Resize|Driver|Memory|Container|Compute|Configuration|Share"
    r"|Claim|DRA|Foreign|Waiting)[A-Z][a-z]\w*"
)
OF_OTHERS = {
    *(
        "DRAPlugin",
        "AllocationRequests",
        "DRAPartitionableDevices",
        "DRAConsumableCapacity",
        "DRADeviceTaints",
    ),
    *("ConfigurationError", "ClaimName", "DriverState", "ClaimInfoStateList"),
}


def test_the_page_of_names_has_every_event_and_the_taint() -> None:
    page = (ROOT / "docs" / "names.md").read_text()
    files = [each for each in (ROOT / "agent").rglob("*.py") if not {"_proto", "simulator"} & {*each.parts}]
    reasons = {
        node.value
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and REASON.fullmatch(node.value)
    } - OF_OTHERS
    assert {"LimitsAvoidable", "MPSDaemonFailed", "ModeApplied", "GPULost", "MIGLayoutReady"} <= reasons
    assert not {each for each in reasons if not re.search(rf"\b{each}\b", page)}
    (row,) = re.findall(r"^\| event reasons \| (.+) \|$", page, re.MULTILINE)
    assert set(row.split()) <= reasons
    assert f"`{TAINT}:{EFFECT}`" in page
