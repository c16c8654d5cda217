"""A typed, strict configuration: flags win over environment, environment over file, file over defaults.

Unknown keys are errors. Every fault is reported, each with its source, its key and what is allowed.
What the keys are is said by a tree of `Section`s elsewhere.
"""

import re
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta, Struct

# Kubernetes sets variables for every Service of the namespace; one that is named like the program has the
# program's prefix. See "Accessing the Service" in Kubernetes' documentation.
_SERVICE_VARIABLE = re.compile(
    r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


class Section(Struct, frozen=True, forbid_unknown_fields=True, rename="camel", kw_only=True):
    """A block of the configuration."""


S = TypeVar("S", bound=Section)


class ConfigurationError(Exception):
    """The configuration is not usable; `faults` has one sentence for each fault."""

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(" ".join(fault.split()) for fault in faults)  # keys may hold line feeds
        super().__init__("; ".join(faults))


def load(
    kind: type[S], file: Path | None, variables: Mapping[str, str], flags: Sequence[str], prefix: str = ""
) -> S:
    """A `kind` from a YAML file, variables (`<prefix>KEY_PATH`) and `key.path=value` flags.

    Other variables than those with the prefix are not looked at. Raises ConfigurationError.
    """
    faults: list[str] = []
    merged: dict[str, Any] = {}
    if file is not None:
        merged = _checked(_read(file), kind, _Source(str(file), lines_of(file)), "", faults)
    for variable, value in variables.items():
        name = variable.removeprefix(prefix)
        if name == variable:
            continue
        path = _path_of_variable(kind, name)
        if _SERVICE_VARIABLE.fullmatch(name) and (path is None or "://" in value):
            continue
        origin = _Source(f"environment variable {variable}")
        _override(kind, merged, path or [name], value, origin, faults)
    for flag in flags:
        written, separator, value = flag.partition("=")
        if separator:
            _override(kind, merged, written.split("."), value, _Source(f"flag --set {flag}"), faults)
        else:
            faults.append(f"flag --set {flag}: write it as key.path=value")
    if faults:
        raise ConfigurationError(faults)
    return msgspec.convert(merged, kind)


def schema(kind: type[Section]) -> dict[str, Any]:
    # As a reader of the file has it: defaults of tuples are lists there.
    return msgspec.json.decode(msgspec.json.encode(msgspec.json.schema(kind)))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Source:
    name: str
    lines: Mapping[str, int] = field(default_factory=dict)

    def at(self, path: str) -> str:
        """The source with the line of a key, as far as it is known."""
        return f"{self.name} line {self.lines[path]}" if path in self.lines else self.name


def lines_of(file: Path) -> Mapping[str, int]:
    """The line of each key of a YAML file, by path (`layouts.mixed[1].gpus`); empty if it cannot be read."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    found: dict[str, int] = {}
    above: list[yaml.Node] = []  # an alias may name a block that it stands in

    def walk(node: yaml.Node | None, path: str) -> None:
        if node is None or node in above:
            return
        above.append(node)
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                here = f"{path}.{key.value}" if path else str(key.value)
                found[here] = key.start_mark.line + 1
                walk(value, here)
        elif isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                found[f"{path}[{number}]"] = item.start_mark.line + 1
                walk(item, f"{path}[{number}]")
        above.pop()

    walk(root, "")
    return found


class _Loader(yaml.SafeLoader):
    """YAML in which no key stands twice: PyYAML would take the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"key {key.value} stands twice in one block"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(file: Path) -> object:
    try:
        document = yaml.load(file.read_text(encoding="utf-8"), _Loader)  # noqa: S506  a SafeLoader
    except OSError as error:
        raise ConfigurationError([f"{file}: cannot be read: {error.strerror}"]) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        # The parser calls it a problem, the reader below it and the decoder a reason.
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "too deeply nested"
        raise ConfigurationError([f"{file}{line}: not valid YAML: {problem}"]) from error
    return {} if document is None else document


def _checked(
    value: object, kind: type[Section], source: _Source, path: str, faults: list[str]
) -> dict[str, Any]:
    """The keys of a block that are right, each fault appended; key by key so that none hides another."""
    if not isinstance(value, dict):
        faults.append(
            f"{source.at(path)}: {path or 'the document'} must be a block of keys, not {_shown(value)}"
        )
        return {}
    fields = _fields(kind)
    good: dict[str, Any] = {}
    for key, item in value.items():
        here = f"{path}.{key}" if path else str(key)
        field = fields.get(key) if isinstance(key, str) else None
        if field is None:
            faults.append(f"{source.at(here)}: unknown key {here}; allowed here: {', '.join(sorted(fields))}")
        else:
            good[key] = _checked_value(item, field, source, here, faults)
    return good


def _checked_value(value: object, kind: Any, source: _Source, path: str, faults: list[str]) -> Any:  # noqa: ANN401
    """A value of any kind, blocks within it looked into; faults are appended and make the answer void."""
    if _is_section(kind):
        return _checked(value, kind, source, path, faults)
    if _holds_sections(kind):
        if typing.get_origin(kind) is dict:
            return _checked_map(value, kind, source, path, faults)
        if isinstance(value, list):
            inner = typing.get_args(kind)[0]
            return [_checked_value(v, inner, source, f"{path}[{n}]", faults) for n, v in enumerate(value)]
        faults.append(f"{source.at(path)}: {path} must be a list, not {_shown(value)}")
    elif fault := _fault(value, kind):
        faults.append(f"{source.at(path)}: {path} {fault}")
    return value


def _checked_map(value: object, kind: Any, source: _Source, path: str, faults: list[str]) -> dict[str, Any]:  # noqa: ANN401
    """The entries of a map of blocks that are right; YAML reads bare numbers as keys, so they are allowed."""
    key_kind, inner = typing.get_args(kind)
    if not isinstance(value, dict):
        faults.append(f"{source.at(path)}: {path} must be a block of keys, not {_shown(value)}")
        return {}
    good: dict[str, Any] = {}
    for key, item in value.items():
        if fault := _fault(str(key), key_kind):
            faults.append(f"{source.at(path)}: {path}: key {_shown(key)} {fault}")
        elif str(key) in good:
            faults.append(f"{source.at(path)}: {path}: key {key} stands twice")
        else:
            good[str(key)] = _checked_value(item, inner, source, f"{path}.{key}", faults)
    return good


def _fault(value: object, kind: object) -> str | None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        hint = ""
        if isinstance(value, bool) and {"on", "off", "yes", "no"} & {*typing.get_args(kind)}:
            hint = ' (YAML takes a bare on or off for true or false: write "off")'
        return f"must be {describe_type(kind)}, not {_shown(value)}{hint}"
    return None


def _override(
    root: type[Section],
    merged: dict[str, Any],
    path: Sequence[str],
    text: str,
    source: _Source,
    faults: list[str],
) -> None:
    """Put one value, written as YAML, at a key path."""
    kind: Any = root
    for step in path:
        fields = _fields(kind) if _is_section(kind) else {}
        if step not in fields:
            allowed = ", ".join(sorted(fields)) or "none"
            faults.append(f"{source.name}: unknown key {'.'.join(path)}; allowed here: {allowed}")
            return
        kind = fields[step]
    if _is_section(kind):
        keys = ", ".join(sorted(_fields(kind)))
        faults.append(f"{source.name}: {'.'.join(path)} is a block; name one of its keys: {keys}")
        return
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if _holds_sections(kind):
        _nested(merged, path, _checked_value(value, kind, source, ".".join(path), faults))
        return
    if value is not None and not isinstance(value, str) and not _fault(text, kind):
        value = text  # a text key whose value looks like a number, a date or a block
    if fault := _fault(value, kind):
        faults.append(f"{source.name}: {'.'.join(path)} {fault}")
        return
    _nested(merged, path, value)


def _nested(merged: dict[str, Any], path: Sequence[str], value: object) -> None:
    block = merged
    for step in path[:-1]:
        block = block.setdefault(step, {})
    block[path[-1]] = value


def _path_of_variable(kind: type[Section], name: str) -> list[str] | None:
    """`KUBELET_REGISTRY_WAIT_SECONDS` -> [`kubelet`, `registryWaitSeconds`]; None: no key is named so."""
    for path in _leaves(kind):
        if "_".join(_snake(step) for step in path).upper() == name:
            return path
    return None


def _leaves(kind: type[Section]) -> list[list[str]]:
    found: list[list[str]] = []
    for key, inner in _fields(kind).items():
        found.extend([[key, *rest] for rest in _leaves(inner)] if _is_section(inner) else [[key]])
    return found


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _fields(kind: type[Section]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _is_section(kind: object) -> typing.TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


def _holds_sections(kind: object) -> bool:
    """Whether a key holds a map or a list of blocks, or of such maps and lists."""
    if typing.get_origin(kind) not in (dict, list):
        return False
    inner = typing.get_args(kind)[-1]
    return _is_section(inner) or _holds_sections(inner)


def describe_type(kind: Any) -> str:  # noqa: ANN401  any type form
    """A type in words, for messages: `one of json, console`, `a number from 0 to 65535`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else describe_type(part) for part in arguments)
    if origin is list:
        return f"a list of {describe_type(arguments[0])}"
    if origin is Annotated:
        return describe_type(arguments[0]) + "".join(_bounds(m) for m in arguments[1:] if isinstance(m, Meta))
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(kind, str(kind))


def _bounds(meta: Meta) -> str:
    if meta.pattern == "^/":
        return " that starts with / (an absolute path)"
    if meta.pattern and meta.pattern.startswith("^[a-z0-9]"):
        return " of lower-case letters, digits, dots, dashes and underscores"
    if meta.pattern == "^[0-9]{1,4}$":
        return " of one to four digits"
    low = meta.ge if meta.ge is not None else meta.gt
    above = "above" if meta.gt is not None else "from"
    return f" {above} {low} to {meta.le}" if low is not None else ""


def _shown(value: object) -> str:
    words: Mapping[object, str] = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)[:60]
