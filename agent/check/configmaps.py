"""The rules of the platform's cf-crl ConfigMaps, one message for each fault.

Two kinds: definitions of resources that users may ask for, one object a resource (`cf-crl-<group>-<key>`),
and device labels that a node may be given (`cf-crl-<name>-config`). Both live in kube-public. Objects of
other vendors' devices follow the same rules. Source: the platform's public documentation of custom resources.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAMESPACE = "kube-public"
PREFIX = "cf-crl-"
CONFIG_SUFFIX = "-config"
CONFIG_LABEL = "device-plugin.cpaas.io/config"
DOMAINS = ("features.cpaas.io", "features.alauda.io")  # the current generation first
KIND = "CustomResourceLimitation"

REQUIRED = (
    "key",
    "dataType",
    "defaultValue",
    "descriptionEn",
    "descriptionZh",
    "group",
    "limits",
    "requests",
)
OPTIONAL = (
    "labelEn",
    "labelZh",
    "groupI18n",
    "resourceUnit",
    "relatedResources",
    "excludeResources",
    "runtimeClassName",
    "ignoreNodeCheck",
)
WORDS = {
    "dataType": ("integer",),
    "limits": ("disabled", "required", "optional"),
    "requests": ("disabled", "required", "fromLimits"),
    "ignoreNodeCheck": ("true", "false"),
}
CONFIG_KEYS = ("deviceName", "nodeLabelKey", "nodeLabelValue")

_DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DOMAIN = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"
_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_RESOURCE = re.compile(rf"{_DOMAIN}/{_NAME}")
_LABEL_KEY = re.compile(rf"({_DOMAIN}/)?{_NAME}")
_LABEL_VALUE = re.compile(rf"({_NAME})?")
_OBJECT_NAME = re.compile(_DOMAIN)


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
    data = {key: value for key, value in found.data.items() if isinstance(value, str)}
    yield from _key_faults(found, data)
    if "key" in data and (fault := _resource_fault(data["key"])):
        yield f"data.key {fault}"
    if "defaultValue" in data and not re.fullmatch(r"[0-9]+", data["defaultValue"]):
        yield f"data.defaultValue must be a whole number, not {_shown(data['defaultValue'])}"
    group = data.get("group")
    if group == "":
        yield "data.group must not be empty"
    elif group and found.name.startswith(PREFIX) and not f"{found.name}-".startswith(f"{PREFIX}{group}-"):
        yield f"metadata.name must be {PREFIX}{group}-<key>, since data.group is {group}"
    if "groupI18n" in data and (fault := _translation_fault(data["groupI18n"])):
        yield f"data.groupI18n {fault}"
    if data.get("runtimeClassName") and not _OBJECT_NAME.fullmatch(data["runtimeClassName"]):
        yield f"data.runtimeClassName {_shown(data['runtimeClassName'])} is no name of a RuntimeClass"
    yield from _list_faults(data)


def _key_faults(found: Found, data: Mapping[str, str]) -> Iterator[str]:
    for key in REQUIRED:
        if key not in found.data:
            yield f"data.{key} is missing"
    for key in found.data:
        if key not in (*REQUIRED, *OPTIONAL):
            yield f"data.{key} is not known; known are {', '.join((*REQUIRED, *OPTIONAL))}"
    for key, allowed in WORDS.items():
        if key in data and data[key] not in allowed:
            yield f"data.{key} must be one of {', '.join(allowed)}, not {_shown(data[key])}"


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
    for key in CONFIG_KEYS:
        if not found.data.get(key):
            yield f"data.{key} is missing"
    for key in found.data:
        if key not in CONFIG_KEYS:
            yield f"data.{key} is not known; known are {', '.join(CONFIG_KEYS)}"
    for key, rule in (("nodeLabelKey", _LABEL_KEY), ("nodeLabelValue", _LABEL_VALUE)):
        value = found.data.get(key)
        if isinstance(value, str) and value and not rule.fullmatch(value):
            yield f"data.{key} {_shown(value)} cannot stand in a label of a node"


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


def _block(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:60]
