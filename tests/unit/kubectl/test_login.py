"""Logins of kubectl that ask something, and completion, by programs in the place of kubectl."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.kubectl import kube
from agent.kubectl.completion import SCRIPT
from agent.kubectl.kube import Kubectl, KubectlFailed, MissingRight
from agent.kubectl.main import plugin_main
from tests import plugin_file
from tests.pace import scaled
from tests.unit.kubectl.test_plugin import asked, fake

__all__ = ["fake"]

LOGIN = """#!/bin/sh
[ "$1" = config ] && exit 0
[ -t 0 ] || { echo "error: no terminal to ask for the password on" >&2; exit 1; }
printf 'Password: ' >&2
read -r word
[ "$word" = sesame ] || { echo "error: You must be logged in to the server (Unauthorized)" >&2; exit 1; }
echo '{"items": []}'
"""
FORBIDDEN = """#!/bin/sh
echo 'User "e" cannot list resource "nodes" in API group "" at the cluster scope' >&2
exit 1
"""


def program(folder: Path, text: str) -> Path:
    file = folder / "kubectl"
    file.write_text(text)
    file.chmod(0o755)
    return file


def on_a_terminal(kubectl: Path, answer: str) -> tuple[int, str]:
    """Exit code and screen of `kubectl gpu --once` on a terminal, on which somebody answers each question."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(plugin_file.FILE), "top", "--once"],
        env={**os.environ, "KUBECTL": str(kubectl)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    screen, answered, until = "", 0, time.monotonic() + scaled(40)
    while time.monotonic() < until:
        if not select.select([ours], [], [], 0.1)[0]:
            if process.poll() is not None:
                break
            continue
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        screen += part.decode()
        while screen.count("Password: ") > answered:
            answered += 1
            os.write(ours, f"{answer}\n".encode())
    os.close(ours)
    try:
        return process.wait(10), screen
    finally:
        process.kill()


def test_a_login_that_asks_gets_its_answer_from_the_terminal(tmp_path: Path) -> None:
    kubectl = program(tmp_path, LOGIN)
    code, screen = on_a_terminal(kubectl, "sesame")
    assert code == 0, screen
    assert "NODE" in screen
    code, screen = on_a_terminal(kubectl, "wrong")
    assert code == 1
    assert "You must be logged in to the server" in screen


def test_a_login_that_asks_where_there_is_no_terminal_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(KubectlFailed, match="no terminal to ask for the password on"):
        Kubectl(program=str(program(tmp_path, LOGIN))).get("/api/v1/nodes")


def test_an_error_at_the_end_is_not_passed_on_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MissingRight):
        Kubectl(program=str(program(tmp_path, FORBIDDEN))).get("/api/v1/nodes")
    assert capsys.readouterr().err == ""


def test_a_page_to_sign_in_on_is_shown_while_kubectl_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "LOGIN_SECONDS", min(scaled(1.0), 5.0))
    kubectl = program(
        tmp_path, "#!/bin/sh\necho 'To sign in, open https://login.example' >&2\nexec sleep 60\n"
    )
    with pytest.raises(KubectlFailed, match=r"did not end within \d s; it said: To sign in, open https"):
        Kubectl(program=str(kubectl)).get("/api/v1/nodes")
    assert capsys.readouterr().err == "To sign in, open https://login.example\n"


def test_a_kubectl_that_hangs_without_a_word_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "CALL_SECONDS", 0.5)
    with pytest.raises(KubectlFailed, match=r"kubectl get did not end within \d s$"):
        Kubectl(program=str(program(tmp_path, "#!/bin/sh\nexec 2>&-\nexec sleep 60\n"))).get("/api/v1/nodes")


def test_a_helper_of_the_login_that_stays_behind_keeps_nobody_waiting(tmp_path: Path) -> None:
    text = "#!/bin/sh\nsleep 30 >/dev/null &\necho '{}'\n"
    began = time.monotonic()
    assert Kubectl(program=str(program(tmp_path, text))).get("/") == {}
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ex"], ["explain"]),
        (["switch", ""], ["a", "b"]),
        (["switch", "b", "m"], ["mps"]),
        (["cordon", "a/"], ["a/0", "a/1"]),
        (["explain", "-n", "team", ""], ["mine", "waits"]),
        (["--namespace=team", "explain", "w"], ["waits"]),
        (["try", "--mode", ""], ["mps", "pgpu", "vgpu"]),
        (["top", "--on"], ["--once"]),
        (["explain", "-n", "foe", "x"], []),
        (["nonsense", "x"], []),
    ],
)
def test_kubectl_completes_the_plugins_words(fake: Path, words: list[str], offered: list[str]) -> None:
    """As kubectl asks: by a program of that name, whose last line says that no names of files fit."""
    folder = fake / "bin"
    folder.mkdir()
    (folder / "kubectl-gpu").symlink_to(plugin_file.FILE)
    completer = folder / "kubectl_complete-gpu"
    completer.write_text(SCRIPT)
    completer.chmod(0o755)
    for name, pods in (("team", ("mine", "waits")), ("foe", ("secret",))):
        items = [(fake / f"api_v1_namespaces_{name}_pods_{each}").read_text() for each in pods]
        (fake / f"api_v1_namespaces_{name}_pods").write_text('{"items": [' + ", ".join(items) + "]}")
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(completer), *words], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.splitlines() == [*offered, ":4"]


def test_completion_asks_with_the_flags_typed_and_offers_nothing_in_an_error(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plugin_main(["completion"]) == 0
    assert capsys.readouterr().out == SCRIPT
    assert plugin_main(["__complete", "--context", "c", "--as=eve", "switch", ""]) == 0
    assert asked(fake)[-1][:3] == ["--context=c", "--as=eve", "--request-timeout=3s"]
    (fake / "api_v1_nodes").unlink()
    capsys.readouterr()
    assert plugin_main(["__complete", "switch", ""]) == 0
    assert capsys.readouterr().out == ":4\n"
