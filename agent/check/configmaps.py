"""The platform's cf-crl ConfigMaps from files or a cluster, and their rules: one message for each fault.

Two kinds: definitions of resources that users may ask for, one object a resource (`cf-crl-<group>-<key>`),
and device labels that a node may be given (`cf-crl-<name>-config`). Both live in kube-public. Objects of
other vendors' devices follow the same rules. Source: the platform's public documentation of custom resources.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
import yaml

from agent.cluster.api import ApiError, connect
from agent.cluster.lean import NoClusterAccess

NAMESPACE = "kube-public"
PREFIX = "cf-crl-"
CONFIG_SUFFIX = "-config"
CONFIG_LABEL = "device-plugin.cpaas.io/config"
DOMAINS = ("features.cpaas.io", "features.alauda.io")  # the current generation first
KIND = "CustomResourceLimitation"
SUFFIXES = (".yaml", ".yml", ".json")

_DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DOMAIN = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"
_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_RESOURCE = re.compile(rf"{_DOMAIN}/{_NAME}")
_LABEL_KEY = re.compile(rf"({_DOMAIN}/)?{_NAME}")
_LABEL_VALUE = re.compile(_NAME)
_OBJECT_NAME = re.compile(_DOMAIN)


Rule = Callable[[str], str | None]  # the fault of a text, as the rest of a sentence; None: it is good


@dataclass(frozen=True, slots=True)
class Found:
    source: str
    content: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(_block(self.content, "metadata").get("name", ""))

    @property
    def labels(self) -> Mapping[str, Any]:
        return _block(_block(self.content, "metadata"), "labels")

    @property
    def data(self) -> Mapping[str, Any]:
        return _block(self.content, "data")

    @property
    def is_config(self) -> bool:
        """Whether it is a device label; else it defines a resource."""
        return CONFIG_LABEL in self.labels or self.name.endswith(CONFIG_SUFFIX)

    def placed(self, fault: str) -> str:
        return f"{self.source}: {self.name or '(no name)'}: {fault}"


def concerns(content: Mapping[str, Any]) -> bool:
    """Whether an object is one of these at all."""
    found = Found("", content)
    marks = {CONFIG_LABEL, *(f"{domain}/type" for domain in DOMAINS)}
    return content.get("kind") == "ConfigMap" and (
        found.name.startswith(PREFIX) or bool(marks & set(found.labels))
    )


def faults(objects: Sequence[Found]) -> list[str]:
    """Every fault of every object, and of all of them together."""
    found = []
    for each in objects:
        rules = _config_faults(each) if each.is_config else _resource_faults(each)
        found += [each.placed(fault) for fault in (*_common_faults(each), *rules)]
    return (
        found
        + list(_joint_faults([each for each in objects if not each.is_config]))
        + list(_twice([each for each in objects if each.is_config]))
    )


def _common_faults(found: Found) -> Iterator[str]:
    namespace = _block(found.content, "metadata").get("namespace")
    if namespace != NAMESPACE:
        yield f"metadata.namespace must be {NAMESPACE}, where the console looks, not {_shown(namespace)}"
    if not found.name.startswith(PREFIX) or not _OBJECT_NAME.fullmatch(found.name):
        yield f"metadata.name must begin with {PREFIX} and hold only lower-case letters, digits and dashes"
    for place, values in (("metadata.labels", found.labels), ("data", found.data)):
        for key, value in values.items():
            if not isinstance(value, str):
                yield f'{place}.{key} must be text: write it in quotes, "{_plain(value)}"'


def _resource_faults(found: Found) -> Iterator[str]:
    yield from _label_faults(found)
    yield from _data_faults(found, RESOURCE, RESOURCE_MAY)
    data = {key: value for key, value in found.data.items() if isinstance(value, str)}
    group = data.get("group")
    if group and found.name.startswith(PREFIX) and not f"{found.name}-".startswith(f"{PREFIX}{group}-"):
        yield f"metadata.name must be {PREFIX}{group}-<key>, since data.group is {group}"
    yield from _list_faults(data)


def _data_faults(found: Found, must: Mapping[str, Rule], may: Mapping[str, Rule]) -> Iterator[str]:
    for key in must:
        if key not in found.data:
            yield f"data.{key} is missing"
    known = {**must, **may}
    for key, value in found.data.items():
        if key not in known:
            yield f"data.{key} is not known; known are {', '.join(known)}"
        elif isinstance(value, str) and (fault := known[key](value)):
            yield f"data.{key} {fault}"


def _label_faults(found: Found) -> Iterator[str]:
    labels = found.labels
    used = [
        domain
        for domain in DOMAINS
        if any(f"{domain}/{part}" in labels for part in ("type", "group", "enabled"))
    ]
    if not used:
        yield f"labels {DOMAINS[0]}/type, /group, /enabled are missing: the console does not see the object"
    for domain in used:
        for part in ("type", "group", "enabled"):
            if f"{domain}/{part}" not in labels:
                yield f"label {domain}/{part} is missing beside the others of {domain}"
        kind, enabled = labels.get(f"{domain}/type", KIND), labels.get(f"{domain}/enabled", "true")
        if kind != KIND:
            yield f"label {domain}/type must be {KIND}, not {_shown(kind)}"
        if isinstance(enabled, str) and enabled not in ("true", "false"):
            yield f'label {domain}/enabled must be "true" or "false", not {_shown(enabled)}'
        group, wanted = labels.get(f"{domain}/group"), found.data.get("group")
        if group is not None and wanted is not None and group != wanted:
            yield f"label {domain}/group is {_shown(group)} and data.group {_shown(wanted)}: they must agree"


def _list_faults(data: Mapping[str, str]) -> Iterator[str]:
    lists = {key: names(data.get(key, "")) for key in ("relatedResources", "excludeResources")}
    for key, found in lists.items():
        for name in found:
            if fault := _resource_fault(name):
                yield f"data.{key}: {_shown(name)} {fault}"
            if name == data.get("key"):
                yield f"data.{key} names {name}, the resource itself"
    for name in sorted(set(lists["relatedResources"]) & set(lists["excludeResources"])):
        yield f"data.relatedResources and data.excludeResources both name {name}; it is one or the other"


def _config_faults(found: Found) -> Iterator[str]:
    if found.labels.get(CONFIG_LABEL) != "true" and not isinstance(found.labels.get(CONFIG_LABEL), bool):
        yield f'label {CONFIG_LABEL} must be "true": the console does not see the object'
    yield from _data_faults(found, CONFIG, {})


def _joint_faults(objects: Sequence[Found]) -> Iterator[str]:
    by_key: dict[str, Found] = {}
    for each in objects:
        key = str(each.data.get("key", ""))
        if key and key in by_key:
            yield each.placed(f"data.key {key} is defined by {by_key[key].name} already")
        by_key.setdefault(key, each)
    for each in objects:
        for name in names(str(each.data.get("relatedResources", ""))):
            other = by_key.get(name)
            if other is None:
                if not _resource_fault(name):
                    yield each.placed(f"data.relatedResources names {name}, which no object here defines")
            elif other.data.get("group") != each.data.get("group"):
                yield each.placed(
                    f"data.relatedResources names {name} of another group; used together, they share one"
                )


def _twice(configs: Sequence[Found]) -> Iterator[str]:
    seen: dict[tuple[str, str], Found] = {}
    for each in configs:
        label = (str(each.data.get("nodeLabelKey")), str(each.data.get("nodeLabelValue")))
        if label in seen:
            yield each.placed(
                f"the node label {label[0]}={label[1]} is offered by {seen[label].name} already"
            )
        seen.setdefault(label, each)


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _resource_fault(name: str) -> str | None:
    if not _RESOURCE.fullmatch(name):
        return "must be an extended resource as in a pod's limits (domain/name)"
    domain = name.partition("/")[0]
    if domain == "kubernetes.io" or domain.endswith(".kubernetes.io"):
        return f"must not lie in {domain}, which is Kubernetes' own"
    return None


def _translation_fault(text: str) -> str | None:
    try:
        found = json.loads(text)
    except ValueError:
        return f"must be JSON, not {_shown(text)}"
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in ("en", "zh")):
        return 'must be a JSON object with texts "en" and "zh"'
    return None


def _any(_: str) -> str | None:
    return None


def _one_of(*allowed: str) -> Rule:
    return lambda text: (
        None if text in allowed else f"must be one of {', '.join(allowed)}, not {_shown(text)}"
    )


def _number_fault(text: str) -> str | None:
    return None if re.fullmatch(r"[0-9]+", text) else f"must be a whole number, not {_shown(text)}"


def _class_fault(text: str) -> str | None:
    return (
        None if not text or _OBJECT_NAME.fullmatch(text) else f"{_shown(text)} is no name of a RuntimeClass"
    )


def _in_a_label(pattern: re.Pattern[str]) -> Rule:
    def fault(text: str) -> str | None:
        if not text:
            return "is missing"
        return None if pattern.fullmatch(text) else f"{_shown(text)} cannot stand in a label of a node"

    return fault


# The keys below `data` that each kind must have, and may have, with the rule of each.
RESOURCE: Mapping[str, Rule] = {
    "key": _resource_fault,
    "dataType": _one_of("integer"),
    "defaultValue": _number_fault,
    "descriptionEn": _any,
    "descriptionZh": _any,
    "group": lambda text: None if text else "must not be empty",
    "limits": _one_of("disabled", "required", "optional"),
    "requests": _one_of("disabled", "required", "fromLimits"),
}
RESOURCE_MAY: Mapping[str, Rule] = {
    "labelEn": _any,
    "labelZh": _any,
    "groupI18n": _translation_fault,
    "resourceUnit": _any,
    "relatedResources": _any,  # with the other list, below
    "excludeResources": _any,
    "runtimeClassName": _class_fault,
    "ignoreNodeCheck": _one_of("true", "false"),
}
CONFIG: Mapping[str, Rule] = {
    "deviceName": lambda text: None if text else "is missing",
    "nodeLabelKey": _in_a_label(_LABEL_KEY),
    "nodeLabelValue": _in_a_label(_LABEL_VALUE),
}


def _block(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:60]


class SourceUnreadable(Exception):
    """A file or the cluster could not be read; the text names it and the cause."""


def from_files(paths: Sequence[Path]) -> list[Found]:
    """cf-crl objects of files; of folders, those of every YAML and JSON file. Raises SourceUnreadable."""
    return [
        Found(str(file), content)
        for path in paths
        for file in _files(path)
        for content in _documents(file)
        if concerns(content)
    ]


def from_cluster(kubeconfig: Path | None) -> list[Found]:
    """cf-crl objects of the cluster. Raises SourceUnreadable."""
    return anyio.run(_from_cluster, kubeconfig)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    return [path]


def _documents(file: Path) -> Iterator[dict[str, Any]]:
    try:
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            yield from _objects(document)
    except OSError as error:
        raise SourceUnreadable(f"{file}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SourceUnreadable(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error


def _objects(document: object) -> Iterator[dict[str, Any]]:
    """A document, or the items of a list (`kubectl get -o yaml` makes one)."""
    if not isinstance(document, dict):
        return
    if str(document.get("kind", "")).endswith("List") and isinstance(document.get("items"), list):
        for item in document["items"]:
            # Items of a typed list do not say their kind.
            yield from _objects({"kind": "ConfigMap", **item} if isinstance(item, dict) else item)
    else:
        yield document


async def _from_cluster(kubeconfig: Path | None) -> list[Found]:
    try:
        async with await connect(kubeconfig) as api:
            data = await api.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps")
    except NoClusterAccess as error:
        raise SourceUnreadable(f"{error}; name one with --kubeconfig") from error
    except ApiError as error:
        raise SourceUnreadable(str(error)) from error
    return [Found("cluster", content) for content in _objects(msgspec.json.decode(data)) if concerns(content)]
