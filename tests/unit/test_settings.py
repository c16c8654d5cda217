"""The configuration: precedence, and every kind of bad input with the sentence it gets."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import settings
from agent.settings import ConfigurationError, Settings


def written(tmp_path: Path, text: str | bytes) -> Path:
    file = tmp_path / "config.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def faults(
    file: Path | None = None, environment: dict[str, str] | None = None, flags: tuple[str, ...] = ()
) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as caught:
        settings.load(file, environment or {}, flags)
    return caught.value.faults


def test_nothing_given_means_the_defaults() -> None:
    loaded = settings.load(environment={})
    assert loaded == Settings()
    assert (loaded.http.port, loaded.default_mode) == (9446, "none")
    assert loaded.device_plugins_folder == Path("/var/lib/kubelet/device-plugins")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "{}"])
def test_an_empty_file_means_the_defaults(tmp_path: Path, text: str) -> None:
    assert settings.load(written(tmp_path, text), {}) == Settings()


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "http: {port: 1, address: 127.0.0.1}\nlogging: {level: debug}\n")
    environment = {"GPU_NODE_AGENT_HTTP_PORT": "2", "GPU_NODE_AGENT_LOGGING_LEVEL": "error"}
    loaded = settings.load(file, environment, ["http.port=3"])
    assert (loaded.http.port, loaded.logging.level, loaded.http.address) == (3, "error", "127.0.0.1")
    assert settings.load(file, environment).http.port == 2
    assert settings.load(file, {}).http.port == 1
    assert settings.load(file, {}, ["http.port=4", "http.port=5"]).http.port == 5


def test_variables_name_keys_in_words() -> None:
    loaded = settings.load(
        environment={
            "GPU_NODE_AGENT_CLUSTER_NODE_NAME": "n1",
            "GPU_NODE_AGENT_DEFAULT_MODE": "pgpu",
            "GPU_NODE_AGENT_INJECTION_DEVICE_NODES": "true",
            "GPU_NODE_AGENT_KUBELET_DEVICE_PLUGINS": "/elsewhere",
            "PATH": "/bin",
        }
    )
    assert loaded.cluster.node_name == "n1"
    assert loaded.default_mode == "pgpu"
    assert loaded.injection.device_nodes
    assert loaded.device_plugins_folder == Path("/elsewhere")


def test_where_the_file_is_is_no_key() -> None:
    assert settings.load(environment={"GPU_NODE_AGENT_CONFIG": "/etc/x.yaml"}) == Settings()


def test_variables_of_a_service_named_like_the_agent_are_not_keys() -> None:
    """Kubernetes sets these in every pod of a namespace with Services gpu-node-agent(-http)."""
    loaded = settings.load(
        environment={
            "GPU_NODE_AGENT_SERVICE_HOST": "10.0.0.7",
            "GPU_NODE_AGENT_SERVICE_PORT": "9446",
            "GPU_NODE_AGENT_SERVICE_PORT_METRICS": "9446",
            "GPU_NODE_AGENT_PORT": "tcp://10.0.0.7:9446",
            "GPU_NODE_AGENT_PORT_9446_TCP": "tcp://10.0.0.7:9446",
            "GPU_NODE_AGENT_PORT_9446_TCP_ADDR": "10.0.0.7",
            "GPU_NODE_AGENT_HTTP_SERVICE_HOST": "10.0.0.8",
            "GPU_NODE_AGENT_HTTP_PORT": "tcp://10.0.0.8:80",
        }
    )
    assert loaded == Settings()


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("cluster.nodeName=12", "12"),
        ("cluster.nodeName=2026-01-02", "2026-01-02"),
        ("cluster.nodeName=a: b", "a: b"),
        ("cluster.nodeName=true", "true"),
        ("cluster.nodeName=x=y", "x=y"),
        ("cluster.nodeName=null", None),
        ("cluster.nodeName=", None),
    ],
)
def test_text_may_look_like_something_else(flag: str, expected: str | None) -> None:
    assert settings.load(environment={}, flags=[flag]).cluster.node_name == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("htpp: {port: 1}", "unknown key htpp; allowed here: cluster, defaultMode"),
        ("http: {prot: 1}", "unknown key http.prot; allowed here: address, port"),
        ("1: 2", "unknown key 1; allowed here:"),
        ("http: 9446", "http must be a block of keys, not 9446"),
        ("http:", "http must be a block of keys, not null"),
        ("- a\n- b", "the document must be a block of keys, not ['a', 'b']"),
        ("just text", "the document must be a block of keys, not 'just text'"),
        ("http: {port: '9446'}", "http.port must be a whole number from 0 to 65535, not '9446'"),
        ("http: {port: 65536}", "http.port must be a whole number from 0 to 65535, not 65536"),
        ("http: {port: -1}", "http.port must be a whole number from 0 to 65535, not -1"),
        ("http: {port: true}", "http.port must be a whole number from 0 to 65535, not true"),
        ("http: {port: 1.5}", "http.port must be a whole number from 0 to 65535, not 1.5"),
        ("http: {port: null}", "http.port must be a whole number from 0 to 65535, not null"),
        (
            "injection: {strategy: cid}",
            "injection.strategy must be one of auto, envvar, cdi, not 'cid'",
        ),
        ("version: 2", "version must be 1, not 2"),
        ("injection: {deviceNodes: maybe}", "injection.deviceNodes must be true or false, not 'maybe'"),
        ("sampling: {intervalSeconds: 0}", "sampling.intervalSeconds must be a number from 0.1 to 60, not 0"),
        ("sampling: {intervalSeconds: .nan}", "sampling.intervalSeconds must be a number from 0.1 to 60"),
        ("sampling: {intervalSeconds: .inf}", "sampling.intervalSeconds must be a number from 0.1 to 60"),
        (
            "kubelet: {root: var/lib/kubelet}",
            "kubelet.root must be text that starts with / (an absolute path), not 'var/lib/kubelet'",
        ),
        (
            "kubelet: {devicePlugins: [a]}",
            "kubelet.devicePlugins must be text that starts with / (an absolute path) or null, not ['a']",
        ),
        ("http: {port: 1}\nhttp: {port: 2}", "line 2: not valid YAML: key http stands twice in one block"),
        ("http: {port: 1, port: 2}", "line 1: not valid YAML: key port stands twice in one block"),
        ("http: [", "line 1: not valid YAML:"),
        ("http:\n\tport: 1", "line 2: not valid YAML:"),
        ("a: 1\n---\nb: 2", "not valid YAML: but found another document"),
        ("http: !!python/name:os.system {}", "line 1: not valid YAML: could not determine a constructor"),
        ("[" * 5000, "not valid YAML: too deeply nested"),
        ("&a [*a]", "the document must be a block of keys, not [[...]]"),
        (
            "layouts: {m: [{gpus: [0], mode: off}]}",
            'vgpu, mps, dra, mig, not false (YAML takes a bare on or off for true or false: write "off")',
        ),
        (b"\xff\xfe\x00", "not valid YAML: invalid start byte"),
        (b"a: \x00", "not valid YAML: special characters are not allowed"),
        (
            "injection: {strategy: cdi, deviceNodes: true}",
            "injection.deviceNodes true cannot go with injection.strategy: cdi",
        ),
        (
            "{https: {port: 9447}, cluster: {access: 'off'}}",
            "https.port needs the API server, which says who may scrape: set cluster.access",
        ),
        ("https: {port: 9446}", "https.port is 9446, as http.port is: give one of them another"),
        (
            "sampling: {intervalSeconds: 30, windowSeconds: 10}",
            "sampling.windowSeconds is 10, less than sampling.intervalSeconds (30)",
        ),
    ],
)
def test_one_sentence_for_a_fault_in_the_file(tmp_path: Path, text: str | bytes, sentence: str) -> None:
    file = written(tmp_path, text)
    (fault,) = faults(file)
    assert sentence in fault
    several = ("cannot go with", "less than", "needs the", "as http.port is")
    if not any(words in sentence for words in several):  # may come from several sources
        assert fault.startswith(str(file))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{a: []}", "layouts.a has no entry; a node that is to offer nothing is labelled disable"),
        (
            "{a: [{gpus: [-1], mode: vgpu}]}",
            "layouts.a[0] -1 is no GPU index; write 0, or a range such as 0-3",
        ),
        ('{a: [{gpus: ["0,1"], mode: vgpu}]}', "layouts.a[0] 0,1 is no GPU index"),
        ("{a: [{gpus: [0], mode: mps}]}", "layouts.a[0] has mode mps, which modes.mps: false turns off"),
    ],
)
def test_layouts_that_no_node_can_have(tmp_path: Path, text: str, sentence: str) -> None:
    file = written(tmp_path, f"modes: {{mps: false}}\nlayouts: {text}\n")
    (fault,) = faults(file)
    assert fault.startswith(f"{file} line 2: {sentence}")


def test_every_fault_is_told_from_every_source(tmp_path: Path) -> None:
    file = written(tmp_path, "http: {port: x, nope: 1}\nlogging: {level: loud}\nbad: 1\n")
    told = faults(
        file,
        {"GPU_NODE_AGENT_HTTP_PORT": "y", "GPU_NODE_AGENT_NOPE": "1"},
        ("http.address", "http=1", "a.b=1", "http.port.x=1"),
    )
    port = "http.port must be a whole number from 0 to 65535"
    assert [fault.removeprefix(str(file)).split("; allowed")[0] for fault in told] == [
        f" line 1: {port}, not 'x'",
        " line 1: unknown key http.nope",
        " line 2: logging.level must be one of debug, info, warning, error, not 'loud'",
        " line 3: unknown key bad",
        f"environment variable GPU_NODE_AGENT_HTTP_PORT: {port}, not 'y'",
        "environment variable GPU_NODE_AGENT_NOPE: unknown key NOPE",
        "flag --set http.address: write it as key.path=value",
        "flag --set http=1: http is a block; name one of its keys: address, port",
        "flag --set a.b=1: unknown key a.b",
        "flag --set http.port.x=1: unknown key http.port.x",
    ]


@pytest.mark.parametrize(("kind", "cause"), [("missing", "No such file"), ("folder", "Is a directory")])
def test_a_file_that_cannot_be_read(tmp_path: Path, kind: str, cause: str) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    (fault,) = faults(path)
    assert fault.startswith(f"{path}: cannot be read: {cause}")


def test_a_wrong_value_in_the_file_is_told_even_when_a_flag_overrides_it(tmp_path: Path) -> None:
    (fault,) = faults(written(tmp_path, "http: {port: x}"), flags=("http.port=1",))
    assert "http.port" in fault


@given(st.binary(max_size=200))
def test_any_bytes_load_or_give_sentences(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(content)
    try:
        settings.load(file, {})
    except ConfigurationError as error:
        told = error.faults
    else:
        return
    assert told
    assert all(fault.startswith(str(file)) and "\n" not in fault for fault in told)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        settings.load(environment={}).http.port = 1  # type: ignore[misc]


LAYOUTS = """
defaultMode: mixed
layouts:
  mixed:
    - {gpus: [0-3, 7], mode: pgpu, replicas: 4}
    - {gpus: [rest], mode: mps}
"""


def test_layouts_are_read(tmp_path: Path) -> None:
    loaded = settings.load(written(tmp_path, LAYOUTS), {})
    assert [entry.mode for entry in loaded.layouts["mixed"]] == ["pgpu", "mps"]
    assert loaded.layouts["mixed"][0].gpus == ["0-3", 7]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("[rest]", "[3]", "line 6: layouts.mixed[1] GPU index 3 stands in entry 1 already"),
        ("mode: mps", "mode: mips", "line 6: layouts.mixed[1].mode must be one of off, pgpu, vgpu, mps"),
        ("mode: mps", "mode: mps, size: 1", "line 6: unknown key layouts.mixed[1].size"),
        ("defaultMode: mixed", "defaultMode: mixd", "line 2: defaultMode must be a mode or a layout"),
        ("mode: mps}", "mode: mps, replicas: 2}", "line 6: layouts.mixed[1] replicas are for mode pgpu"),
        ("  mixed:", "  pgpu: []\n  mixed:", "line 4: layouts.pgpu has the name of a mode"),
        ("  mixed:", "  enable: []\n  mixed:", "line 4: layouts.enable has a name that is read as vgpu"),
        ("  mixed:", "  pgpu-dra: []\n  mixed:", "layouts.pgpu-dra has a name that leaves the node to"),
        ("  mixed:", "  switching: []\n  mixed:", "layouts.switching has the word that nodes show"),
        ("  mixed:", "  Bad Name: []\n  mixed:", "layouts: key 'Bad Name' must be text of lower-case"),
        ("- {gpus: [rest], mode: mps}", "- rest", "line 6: layouts.mixed[1] must be a block of keys"),
    ],
)
def test_bad_layouts_are_told_with_their_line(tmp_path: Path, before: str, after: str, told: str) -> None:
    assert before in LAYOUTS
    (fault,) = faults(written(tmp_path, LAYOUTS.replace(before, after)))
    assert told in fault


def test_a_default_mode_that_is_turned_off_is_no_default(tmp_path: Path) -> None:
    (fault,) = faults(written(tmp_path, "defaultMode: mps\nmodes: {mps: false}\n"))
    assert fault.endswith("line 1: defaultMode is mps, which modes.mps: false turns off")


@pytest.mark.parametrize(
    ("flags", "longest", "told"),
    [
        (
            ["modes.mps=false"],
            96,
            "the agent's socket 108 bytes long, and the kernel takes 107; name a shorter folder",
        ),
        ([], 38, "an MPS control daemon 108 bytes long, .*; name a shorter folder, or set modes.mps: false"),
    ],
)
def test_a_run_folder_whose_socket_path_would_be_too_long_is_refused(
    flags: list[str], longest: int, told: str
) -> None:
    folder = "/" + "r" * (longest - 1)
    assert settings.load(None, {}, [*flags, f"host.run={folder}"]).host.run == folder
    with pytest.raises(ConfigurationError, match=rf"host\.run makes the path of .*{told}"):
        settings.load(None, {}, [*flags, f"host.run={folder}r"])
