"""One typed, strict configuration: flags win over environment, environment over file, file over defaults.

Unknown keys are errors. Every fault is reported, each with its source, its key and what is allowed.
"""

import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct

ENVIRONMENT_PREFIX = "GPU_NODE_AGENT_"
# A variable of that prefix which is no configuration key: where the file is.
RESERVED_ENVIRONMENT = frozenset({"CONFIG"})

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=3600)]
AbsolutePath = Annotated[str, Meta(pattern="^/")]
QuietSeconds = Annotated[float, Meta(ge=0, le=604800)]
XidNumber = Annotated[str, Meta(pattern="^[0-9]{1,4}$")]


class Section(Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """A block of the configuration."""


class Logging(Section, frozen=True):
    """How the agent writes its log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class Http(Section, frozen=True):
    """Where /metrics, /healthz and /readyz are served. Port 0 takes any free port."""

    address: str = "0.0.0.0"  # noqa: S104  the kubelet probes the pod's address
    port: Port = 9446


class Kubelet(Section, frozen=True):
    """Folders of the kubelet, as the agent sees them."""

    root: AbsolutePath = "/var/lib/kubelet"
    # A constant of the kubelet whatever its --root-dir says; null: <root>/device-plugins.
    device_plugins: AbsolutePath | None = None
    registration: Literal["auto", "registry", "socket"] = "auto"
    # How long plugins_registry may go unread before kubelet.sock is used instead.
    registry_wait_seconds: Seconds = 10.0


class Cluster(Section, frozen=True):
    """Access to the Kubernetes API server. Without it the agent serves pods, only with less knowledge."""

    # auto: a pod's service account or the kubeconfig where there is one; required: fail without.
    access: Literal["auto", "required", "off"] = "auto"
    kubeconfig: AbsolutePath | None = None
    # The name of this node's Node object; null: the host's name. In a pod the chart sets it.
    node_name: str | None = None


class DriverFiles(Section, frozen=True):
    """Where the NVIDIA driver's files are, as the agent sees them."""

    root: AbsolutePath = "/"
    library: AbsolutePath | None = None  # libnvidia-ml.so.1 by full path; null: searched under root
    # Prefix of the device nodes on the HOST (they are named to the container runtime); null: "/".
    dev_root: AbsolutePath | None = None


class Host(Section, frozen=True):
    """Folders of the node that the agent owns or reads."""

    sysfs: AbsolutePath = "/sys"
    state: AbsolutePath = "/var/lib/gpu-node-agent"
    run: AbsolutePath = "/run/gpu-node-agent"
    cdi: AbsolutePath = "/var/run/cdi"


class Injection(Section, frozen=True):
    """How a container gets its GPUs."""

    strategy: Literal["auto", "envvar", "cdi"] = "auto"
    # Also name the device nodes to the kubelet, for runtimes that are not NVIDIA's.
    device_nodes: bool = False


class Sampling(Section, frozen=True):
    """How often the moving figures of the GPUs are read."""

    interval_seconds: Annotated[float, Meta(ge=0.1, le=60)] = 1.0


class XidOverride(Section, frozen=True):
    """How one Xid is judged here; what is left out stays as the table of `docs/health.md` has it."""

    class_: Literal["application", "needs_reset", "needs_reboot", "contained", "informational"] | None = (
        msgspec.field(default=None, name="class")
    )
    verdict: Literal["count", "suspect", "unhealthy"] | None = None
    # False: only a reset that was seen, a reboot or `clear-health` brings the GPU back.
    recovers: bool | None = None
    quiet_seconds: QuietSeconds | None = None


class QuietTimes(Section, frozen=True):
    """Seconds without a new event, probes passing, before a GPU is trusted again; by kind of fault."""

    needs_reset: QuietSeconds = 300.0
    needs_reboot: QuietSeconds = 300.0
    contained: QuietSeconds = 300.0
    unknown: QuietSeconds = 300.0  # Xids that are not in the table
    ecc: QuietSeconds = 300.0  # uncorrectable memory errors
    lost: QuietSeconds = 60.0
    probe: QuietSeconds = 30.0  # NVML did not answer, or with an error


class Health(Section, frozen=True):
    """How GPUs are judged. `xids` is keyed by Xid number."""

    probe_seconds: Annotated[float, Meta(ge=0.2, le=4)] = 2.0  # a lost GPU is to be found within 5 s
    kernel_log: AbsolutePath | None = "/dev/kmsg"  # null: Xids that fall while the agent is away go unseen
    quiet: QuietTimes = QuietTimes()
    xids: dict[XidNumber, XidOverride] = msgspec.field(default_factory=dict)


class Settings(Section, frozen=True):
    """The whole configuration of the node agent."""

    version: Literal[1] = 1
    default_mode: Literal["none", "pgpu", "vgpu", "mps"] = "none"
    logging: Logging = Logging()
    http: Http = Http()
    kubelet: Kubelet = Kubelet()
    cluster: Cluster = Cluster()
    driver: DriverFiles = DriverFiles()
    host: Host = Host()
    injection: Injection = Injection()
    sampling: Sampling = Sampling()
    health: Health = Health()

    @property
    def device_plugins_folder(self) -> Path:
        """Folder of kubelet.sock."""
        return Path(self.kubelet.device_plugins or f"{self.kubelet.root}/device-plugins")


class ConfigurationError(Exception):
    """The configuration is not usable; `faults` has one sentence for each fault."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("; ".join(faults))


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Settings:
    """Settings from a YAML file, `GPU_NODE_AGENT_*` variables and `key.path=value` flags.

    Blocks on the file; call it from a thread once the loop runs. Raises ConfigurationError.
    """
    faults: list[str] = []
    merged: dict[str, Any] = {}
    if file is not None:
        merged = _checked(_read(file), Settings, str(file), "", faults)
    for key, value in (environment if environment is not None else os.environ).items():
        name = key.removeprefix(ENVIRONMENT_PREFIX)
        if name != key and name not in RESERVED_ENVIRONMENT:
            _override(merged, _path_of_variable(name), value, f"environment variable {key}", faults)
    for flag in flags:
        path, separator, value = flag.partition("=")
        if not separator:
            faults.append(f"flag --set {flag}: write it as key.path=value")
            continue
        _override(merged, path.split("."), value, f"flag --set {flag}", faults)
    if not faults:
        settings = msgspec.convert(merged, Settings)
        faults.extend(_impossible(settings))
        if not faults:
            return settings
    raise ConfigurationError(faults)


def schema() -> dict[str, Any]:
    """JSON schema of the configuration file, as published in `config/schema.json`."""
    return msgspec.json.schema(Settings)


def _read(file: Path) -> object:
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError([f"{file}: cannot be read: {error.strerror}"]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or "it is not UTF-8 text"
        raise ConfigurationError([f"{file}{line}: not valid YAML: {problem}"]) from error
    return {} if document is None else document


def _checked(value: object, kind: type[Section], source: str, path: str, faults: list[str]) -> dict[str, Any]:
    """The keys of a block that are right, each fault appended; key by key so that none hides another."""
    if not isinstance(value, dict):
        faults.append(f"{source}: {path or 'the document'} must be a block of keys, not {_shown(value)}")
        return {}
    fields = _fields(kind)
    good: dict[str, Any] = {}
    for key, item in value.items():
        here = f"{path}.{key}" if path else str(key)
        field = fields.get(key) if isinstance(key, str) else None
        if field is None:
            faults.append(f"{source}: unknown key {here}; allowed here: {', '.join(sorted(fields))}")
        elif _section_of_map(field):
            good[key] = _checked_map(item, field, source, here, faults)
        elif _is_section(field):
            good[key] = _checked(item, field, source, here, faults)
        elif fault := _fault(item, field):
            faults.append(f"{source}: {here} {fault}")
        else:
            good[key] = item
    return good


def _checked_map(value: object, kind: Any, source: str, path: str, faults: list[str]) -> dict[str, Any]:  # noqa: ANN401
    """The entries of a map of blocks that are right; YAML reads bare numbers as keys, so they are allowed."""
    key_kind, inner = typing.get_args(kind)
    if not isinstance(value, dict):
        faults.append(f"{source}: {path} must be a block of keys, not {_shown(value)}")
        return {}
    good: dict[str, Any] = {}
    for key, item in value.items():
        if fault := _fault(str(key), key_kind):
            faults.append(f"{source}: {path}: key {_shown(key)} {fault}")
        else:
            good[str(key)] = _checked(item, inner, source, f"{path}.{key}", faults)
    return good


def _fault(value: object, kind: object) -> str | None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return f"must be {describe_type(kind)}, not {_shown(value)}"
    return None


def _override(merged: dict[str, Any], path: Sequence[str], text: str, source: str, faults: list[str]) -> None:
    """Put one value, written as YAML, at a key path."""
    kind: Any = Settings
    for step in path:
        fields = _fields(kind) if _is_section(kind) else {}
        if step not in fields:
            allowed = ", ".join(sorted(fields)) or "none"
            faults.append(f"{source}: unknown key {'.'.join(path)}; allowed here: {allowed}")
            return
        kind = fields[step]
    if _is_section(kind):
        keys = ", ".join(sorted(_fields(kind)))
        faults.append(f"{source}: {'.'.join(path)} is a block; name one of its keys: {keys}")
        return
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if _section_of_map(kind):
        _nested(merged, path, _checked_map(value, kind, source, ".".join(path), faults))
        return
    if isinstance(value, (int, float, bool)) and not _fault(text, kind):
        value = text  # a string key whose value looks like a number
    if fault := _fault(value, kind):
        faults.append(f"{source}: {'.'.join(path)} {fault}")
        return
    _nested(merged, path, value)


def _nested(merged: dict[str, Any], path: Sequence[str], value: object) -> None:
    block = merged
    for step in path[:-1]:
        block = block.setdefault(step, {})
    block[path[-1]] = value


def _path_of_variable(name: str) -> list[str]:
    """`KUBELET_REGISTRY_WAIT_SECONDS` -> [`kubelet`, `registryWaitSeconds`]; unknown names come whole."""
    for path in _leaves(Settings):
        if "_".join(_snake(step) for step in path).upper() == name:
            return path
    return [name]


def _leaves(kind: type[Section]) -> list[list[str]]:
    found: list[list[str]] = []
    for key, field in _fields(kind).items():
        found.extend([[key, *rest] for rest in _leaves(field)] if _is_section(field) else [[key]])
    return found


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _fields(kind: type[Section]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _is_section(kind: object) -> typing.TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


def _section_of_map(kind: object) -> bool:
    """Whether a key holds a map of blocks."""
    return typing.get_origin(kind) is dict and _is_section(typing.get_args(kind)[1])


def describe_type(kind: Any) -> str:  # noqa: ANN401  any type form
    """A type in words, for messages: `one of json, console`, `a number from 0 to 65535`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else describe_type(part) for part in arguments)
    if origin is Annotated:
        return describe_type(arguments[0]) + "".join(_bounds(m) for m in arguments[1:] if isinstance(m, Meta))
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(kind, str(kind))


def _bounds(meta: Meta) -> str:
    if meta.pattern == "^/":
        return " that starts with / (an absolute path)"
    if meta.pattern == "^[0-9]{1,4}$":
        return " of one to four digits"
    low = meta.ge if meta.ge is not None else meta.gt
    above = "above" if meta.gt is not None else "from"
    return f" {above} {low} to {meta.le}" if low is not None else ""


def _shown(value: object) -> str:
    return "null" if value is None else repr(value)[:60]


def _impossible(settings: Settings) -> list[str]:
    """Combinations that no single key shows to be wrong."""
    faults = []
    if settings.injection.strategy == "cdi" and settings.injection.device_nodes:
        faults.append(
            "injection.deviceNodes: true cannot go with injection.strategy: cdi, whose devices bring "
            "their nodes along; set one of them differently"
        )
    return faults
