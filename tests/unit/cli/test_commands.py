"""The command line as a whole: its page, its completion, pipes, kubectl's rules for a kubeconfig."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agent.cli import completion
from agent.cli import main as cli
from agent.cli.arguments import duration
from tests import commands_reference

ROOT = Path(__file__).resolve().parents[3]


def test_commands_page_is_the_parser() -> None:
    assert commands_reference.PAGE.read_text() == commands_reference.written(), "make docs"
    found = list(commands_reference.leaves(cli._parser()))
    hooks = {path for path, *_, hidden in found if hidden}
    assert hooks == {"check nodes", "cleanup cluster"}
    names = {path for path, *_ in found} - hooks
    assert len(names) == len(found) - 2 == 22
    text = commands_reference.tables()
    assert all(f"`gpu-node-agent {name}" in text for name in names)
    assert not any(f"`gpu-node-agent {name}" in text for name in hooks)


def test_hooks_of_the_chart_are_not_in_help() -> None:
    parts = completion.parts_of(cli._parser())
    assert "cluster" not in parts["cleanup"].format_help()
    assert "nodes" not in parts["check"].format_help().replace("node's", "")
    parsed = cli._parser().parse_args(["check", "nodes", "--namespace=n", "--daemonset=d"])
    assert callable(parsed.command)  # and still there


def test_closed_pipe_is_quiet() -> None:
    reading, writing = os.pipe()
    os.close(reading)  # who reads has left before the first line
    done = subprocess.run(
        [sys.executable, "-m", "agent", "version"],
        cwd=ROOT,
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=30,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (cli.CLOSED_PIPE, b"")


def config(path: Path, cluster: str, *, current: bool = True) -> Path:
    """A kubeconfig of one cluster, whose server has its name."""
    named = {"name": cluster}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{**named, "cluster": {"server": f"http://{cluster}:1"}}],
        "users": [{**named, "user": {"token": "x"}}],
        "contexts": [{**named, "context": {"cluster": cluster, "user": cluster}}],
        **({"current-context": cluster} if current else {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(document))
    return path


# In an interpreter of its own: the client's loader reads files on the loop, which tests elsewhere refuse.
PROBE = """
import asyncio, json, os, sys
from agent.cli import main as cli
from agent.cli.arguments import duration
from agent.cli.arguments import kubeconfig
from agent.cluster import lean
os.environ.pop("KUBERNETES_SERVICE_HOST", None)
for known, flags in json.load(sys.stdin):
    os.environ.pop("KUBECONFIG", None)
    os.environ.update({"KUBECONFIG": known} if known else {})
    options = cli._parser().parse_args(["explain", "ns/x", *flags])
    try:
        print(asyncio.run(lean.configuration(kubeconfig(options))).host)
    except lean.NoClusterAccess as error:
        print(error)
"""


def hosts(home: Path, *cases: tuple[str, list[str]]) -> list[str]:
    """The server that is found, or why none is; for each KUBECONFIG and flags."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=ROOT,
        env={**os.environ, "HOME": str(home)},
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_kubeconfig_rules(tmp_path: Path) -> None:
    """The flag, then the files of KUBECONFIG that are there, then ~/.kube/config; the first wins."""
    first, second = config(tmp_path / "1", "first", current=False), config(tmp_path / "2", "second")
    third, empty, none = config(tmp_path / "3", "third"), tmp_path / "empty", tmp_path / "none"
    empty.touch()
    (nothing,) = hosts(tmp_path, ("", []))
    assert "no kubeconfig is configured" in nothing
    config(tmp_path / ".kube" / "config", "home")
    listed = os.pathsep.join(map(str, (none, empty, first, second, third)))
    found = hosts(
        tmp_path,
        ("", []),
        (listed, []),
        (listed, [f"--kubeconfig={third}"]),
        (str(none), []),
        (str(empty), []),
    )
    assert found[:3] == ["http://home:1", "http://second:1", "http://third:1"]
    assert "No such file" in found[3]
    assert "it is empty" in found[4]


def test_documents_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "compat", "--runtime=12.4", "--driver=550.144.03"]
    assert cli.main([*arguments, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["runtime"]) == ("allowed", "12.4")
    assert cli.main([*arguments, "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == found
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith("allowed: CUDA 12.4 in mode pgpu on a driver for CUDA 12.4")


@pytest.mark.parametrize(
    ("typed", "offered"), [("st", "status"), ("check n", "node"), ("clean node --w", "")], ids=str
)
def test_completion_in_bash(typed: str, offered: str) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    words = ["gpu-node-agent", *typed.split(" ")]
    array = " ".join(f"'{word}'" for word in words)
    end = f'COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _gpu_node_agent; echo "${{COMPREPLY[*]}}"'
    text = completion.script(cli._parser(), "bash") + end
    done = subprocess.run([bash, "-c", text], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ([offered] if offered else [])
    assert done.stderr == ""


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion_knows_every_command_that_help_shows(shell: str) -> None:
    text = completion.script(cli._parser(), shell)
    for word in ("status", "clear-health", "compat", "--watch" if shell != "fish" else "-l watch"):
        assert word in text
    assert "daemonset" not in text


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_durations_as_people_write_them(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "10x", "-5m", "1:30", "ten"])
def test_other_words_are_no_durations(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write 90s, 10m or 2h"):
        duration(text)
