"""How NVIDIA's generator is called, and what becomes of its failures. The real one runs in tests/cluster."""

import json
from pathlib import Path

import pytest

from agent.injection import toolkit
from agent.injection.toolkit import BadSpecification, GenerationFailed, Places, Toolkit, present
from tests.unit.injection.test_specification import text

# Notes down how it is called; a transform hands on what it reads, to the file that is named last.
PROGRAM = """#!/bin/sh
echo "$@" >>{folder}/calls
env >{folder}/environment
case "$*" in
*"cdi transform"*) {transform} ;;
*) {generate} ;;
esac
"""
WRITES = 'for last; do :; done; cat >"${last#--output=}"'


class Scene:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "image"
        self.bin.mkdir()
        self.state = folder / "state"
        (folder / "spec.json").write_bytes(text("GPU-a"))
        self.program(f"cat {folder}/spec.json")
        hook = self.bin / "nvidia-cdi-hook"
        hook.write_bytes(b"hook")
        hook.chmod(0o755)

    def program(self, generate: str, transform: str = WRITES) -> None:
        program = self.bin / "nvidia-ctk"
        program.write_text(PROGRAM.format(folder=self.folder, generate=generate, transform=transform))
        program.chmod(0o755)

    def toolkit(self, root: str, host: str) -> Toolkit:
        return Toolkit(Places(self.bin, Path(root), Path(host), self.state))

    def calls(self) -> list[list[str]]:
        return [line.split() for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_one_call_where_agent_and_host_see_the_same_paths(scene: Scene) -> None:
    found = await scene.toolkit("/", "/").generate()
    assert found.names == {"GPU-a"}
    (call,) = scene.calls()
    assert call[:3] == ["--quiet", "cdi", "generate"]
    assert {
        "--mode=nvml",
        "--format=json",
        "--vendor=gpu-node-agent.io",
        "--class=gpu",
        "--device-name-strategy=uuid",
        "--no-all-device",
        "--driver-root=/",
        "--dev-root=/",
        f"--nvidia-cdi-hook-path={scene.state}/nvidia-cdi-hook",
    } == set(call[3:])
    assert (scene.state / "nvidia-cdi-hook").read_bytes() == b"hook"


async def test_paths_are_rewritten_for_the_host(scene: Scene) -> None:
    root = scene.folder / "host"
    (root / "dev").mkdir(parents=True)
    (root / "dev/nvidiactl").touch()
    found = await scene.toolkit(str(root), "/").generate()
    generated, transformed = scene.calls()
    assert f"--dev-root={root}" in generated
    *fixed, output = transformed
    assert fixed == [
        "--quiet", "cdi", "transform", "root", f"--from={root}", "--to=/", "--relative-to=host",
    ]  # fmt: skip
    assert output.startswith("--output=/")
    assert not Path(output.removeprefix("--output=")).exists()  # noqa: ASYNC240  a test's look
    assert json.loads(found.encoded()) == json.loads(text("GPU-a"))


@pytest.mark.parametrize("transform", ["exit 0", "exit 1", "echo >/dev/null"])
async def test_a_transform_that_writes_nothing_is_told(scene: Scene, transform: str) -> None:
    scene.program(f"cat {scene.folder}/spec.json", transform)
    with pytest.raises(GenerationFailed, match="cdi transform root"):
        await scene.toolkit("/other", "/").generate()


async def test_a_driver_root_without_nodes_takes_those_of_the_machine(scene: Scene) -> None:
    await scene.toolkit(str(scene.folder / "files"), "/home/kubernetes/bin/nvidia").generate()
    assert "--dev-root=/" in scene.calls()[0]


async def test_variables_that_are_options_of_the_program_are_not_handed_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVIDIA_CTK_CDI_GENERATE_DISABLED_HOOKS", "all")
    monkeypatch.setenv("OTHER", "stays")
    await scene.toolkit("/", "/").generate()
    environment = (scene.folder / "environment").read_text()
    assert "NVIDIA_CTK" not in environment
    assert "OTHER=stays" in environment


async def test_what_the_program_says_is_told(scene: Scene) -> None:
    scene.program("echo 'no such device' >&2; exit 1")
    with pytest.raises(GenerationFailed, match=r"no such device.*injection\.driverRoot"):
        await scene.toolkit("/", "/").generate()


async def test_a_program_that_hangs_is_ended(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "SECONDS", 0.5)
    scene.program("sleep 600")
    with pytest.raises(GenerationFailed, match="did not end within"):
        await scene.toolkit("/", "/").generate()


async def test_endless_output_is_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "MOST_BYTES", 1000)
    scene.program("yes")
    with pytest.raises(GenerationFailed, match="more than 1000 bytes"):
        await scene.toolkit("/", "/").generate()


async def test_nonsense_is_refused(scene: Scene) -> None:
    scene.program("echo {}")
    with pytest.raises(BadSpecification):
        await scene.toolkit("/", "/").generate()


async def test_a_file_that_is_no_program_is_told(scene: Scene) -> None:
    (scene.bin / "nvidia-ctk").chmod(0o644)
    with pytest.raises(GenerationFailed, match="cannot be run"):
        await scene.toolkit("/", "/").generate()


def test_both_programs_must_be_there(scene: Scene, tmp_path: Path) -> None:
    assert present(scene.bin)
    (scene.bin / "nvidia-cdi-hook").unlink()
    assert not present(scene.bin)
    assert not present(tmp_path / "nowhere")
