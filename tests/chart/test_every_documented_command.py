"""Each command and block of the documents is executed, or parsed by the real program, or listed with why not.

What needs a cluster is executed by tests/cluster/test_documented_commands.py, by the same list.
"""

import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from agent.cli import main as cli
from agent.settings import Settings, load
from tests.chart import helm
from tests.chart.documented import PAGES, ROOT, How, Piece, pieces
from tests.chart.documents import commands
from tests.component.monitoring import queries
from tests.component.monitoring.prometheus import prometheus

AUTHORITY = "/etc/kubernetes/pki/"
VALUES = {"metrics", "platform", "attribution", "extender", "pools"}


def chosen(how: How, language: str = "sh") -> list[Piece]:
    return [each for each in pieces() if each.rule and each.rule.how is how and each.language == language]


def test_every_documented_command() -> None:
    """The three counts; the tests below and the one on the cluster do what they say."""
    found = list(pieces())
    nobody = [f"{each.page}: {each.text}" for each in found if each.rule is None]
    assert not nobody, "say in tests/chart/documented.py what becomes of these:\n" + "\n".join(nobody)
    for each in found:
        if each.language == "sh":
            shlex.split(each.text)
    by_way = Counter(each.rule.how for each in found if each.rule)
    executed = by_way[How.HERE] + by_way[How.CLUSTER] + by_way[How.ELSEWHERE]
    parsed, listed = by_way[How.PARSED], by_way[How.NOT]
    print(f"{len(found)} commands and blocks: {executed} executed, {parsed} parsed, {listed} listed:")
    for each in found:
        if each.rule and each.rule.how is How.NOT:
            print(f"  {each.page}: {each.text[:70]}: {each.rule.why}")
            assert each.rule.why
    assert executed + parsed + listed == len(found) > 100
    assert executed >= len(found) / 2


def test_a_command_that_nobody_classified_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "new.md"
    page.write_text("# New\n\n    frobnicate --all\n\n```yaml\na: 1\n```\n")
    monkeypatch.setattr("tests.chart.documented.PAGES", [page])
    with pytest.raises(AssertionError, match=r"new\.md: frobnicate --all"):
        test_every_documented_command()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a certificate authority, as /etc/kubernetes/pki has one."""
    made = tmp_path_factory.mktemp("documented")
    request = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=kubernetes"
    run([*shlex.split(request), "-keyout", "ca.key", "-out", "ca.crt"], made)
    return made


def run(argv: list[str], folder: Path, codes: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in codes, f"{shlex.join(argv)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_commands_that_need_no_cluster_are_executed(folder: Path) -> None:
    for piece in chosen(How.HERE):
        words = shlex.split(piece.text.replace(AUTHORITY, f"{folder}/"))
        if words[0] == "gpu-node-agent":
            places = {"FILE": str(ROOT / "config/default.yaml"), "my-devices/": str(ROOT / "config/platform")}
            words = [sys.executable, "-m", "agent", *(places.get(word, word) for word in words[1:])]
            run(words, ROOT, codes=(0, 1, 3) if "compat" in words else (0,))
        else:
            run(words, folder)
    assert (folder / "tls.crt").read_text().startswith("-----BEGIN CERTIFICATE")


def test_commands_are_parsed_by_their_programs() -> None:
    by_helm = [words for page in PAGES for words in commands(page) if words[0] == "helm"]
    for piece in chosen(How.PARSED):
        words = shlex.split(piece.text)
        match words[0]:
            case "make":
                run(["make", "--dry-run", *words[1:]], ROOT)
            case "helm":  # tests/chart/test_documents.py renders the chart with its flags
                assert words in by_helm, piece.text
            case "gpu-node-agent":
                assert callable(cli._parser().parse_args(words[1:]).command)
            case _:
                run(["bash", "-n", "-c", piece.text], ROOT)
                assert all((ROOT / path).exists() for path in re.findall(r"config/[\w./-]+", piece.text))


def as_pod(fragment: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a pod's manifest in the place that it belongs to."""
    container: dict[str, Any] = {"name": "main", "image": "example"}
    spec: dict[str, Any] = {"containers": [container]}
    if "resources" in fragment:
        container |= fragment
    elif "nodeSelectorTerms" in fragment:
        required = {"requiredDuringSchedulingIgnoredDuringExecution": fragment}
        spec |= {"affinity": {"nodeAffinity": required}}
    else:
        spec |= fragment
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "fragment"}, "spec": spec}


def as_claim(fragment: Mapping[str, Any]) -> dict[str, Any]:
    """The same for the devices of a claim."""
    asked = [{"name": "gpu", "exactly": {"deviceClassName": "gpu-mps"}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": "fragment"},
        "spec": {"devices": {"requests": asked, **fragment}},
    }


def test_yaml_is_taken_by_its_readers(tmp_path: Path) -> None:
    keys = set(msgspec.to_builtins(Settings()))
    readers: Counter[str] = Counter()
    for number, piece in enumerate(chosen(How.PARSED, "yaml")):
        objects = list(yaml.safe_load_all(piece.text))
        found = objects.pop()
        for each in objects:  # what its last object refers to
            kubernetes_validate.validate(each, "1.36", strict=True)
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(found))
        if "kind" in found:
            kubernetes_validate.validate(found, "1.36", strict=True)
            readers["pod"] += 1
        elif set(found) == {"config"}:  # of a claim's devices
            kubernetes_validate.validate(as_claim(found), "1.36", strict=True)
            readers["claim"] += 1
        elif set(found) <= keys - VALUES:
            load(file, {}, [])
            readers["agent"] += 1
        elif set(found) <= VALUES | {"config", "mig"}:
            assert helm.template(file)
            readers["helm"] += 1
        elif "spec" in found:  # kube-scheduler's static pod, as far as it is changed
            names = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "kube-scheduler"}}
            kubernetes_validate.validate({**names, **found}, "1.36", strict=True)
            readers["scheduler"] += 1
        else:
            kubernetes_validate.validate(as_pod(found), "1.36", strict=True)
            readers["fragment"] += 1
    print(dict(readers))
    assert {"pod", "agent", "helm", "scheduler", "fragment", "claim"} == set(readers)


async def test_promql_is_executed(tmp_path: Path) -> None:
    """By a real Prometheus without series; that each returns data is tested beside an agent."""
    async with prometheus(tmp_path, 9, {}) as server:
        texts = [piece.text.strip() for piece in chosen(How.HERE, "promql")]
        for text in texts:
            await server.query(text.replace("$__rate_interval", "1m"))
        assert [queries.quickened(text) for text in texts] == queries.documented()


NUMBERS = {"three": 3, "five": 5, "ten": 10, "fifteen": 15, "twenty": 20, "quarter": 15, "hour": 60}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_each_page_says_for_whom_it_is_and_how_long_it_takes(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    head = text.split("\n\n")[1].replace("\n", " ")
    assert re.match(r"For [^;]+; ", head), f"{page.name} begins: {head[:80]}"
    said = head.partition("; ")[2]
    minutes = next((NUMBERS[word] for word in re.findall(r"[a-z]+", said)[:5] if word in NUMBERS), None)
    assert minutes, f"{page.name} does not say how long it takes: {head[:80]}"
    words = len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split())
    # 120 to 600 words a minute: tables are looked up, not read.
    assert words / 600 <= minutes <= max(5, words / 60), f"{page.name}: {words} words in {minutes} minutes"
