"""cf-crl ConfigMaps: good ones pass, every fault is reported once, with its place."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.check.configmaps import Found, concerns, faults, from_files
from agent.cli.main import main

OWN = Path(__file__).parents[3] / "config" / "platform"

# Another vendor's device, as the platform's own documents show one.
FOREIGN: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {
        "name": "cf-crl-amd-gpu",
        "namespace": "kube-public",
        "labels": {
            "features.cpaas.io/type": "CustomResourceLimitation",
            "features.cpaas.io/group": "amd-gpu",
            "features.cpaas.io/enabled": "true",
        },
    },
    "data": {
        "key": "amd.com/gpu",
        "dataType": "integer",
        "defaultValue": "1",
        "descriptionEn": "GPUs",
        "descriptionZh": "",
        "group": "amd-gpu",
        "limits": "optional",
        "requests": "fromLimits",
    },
}
LABEL: dict[str, Any] = {
    "kind": "ConfigMap",
    "metadata": {
        "name": "cf-crl-amd-config",
        "namespace": "kube-public",
        "labels": {"device-plugin.cpaas.io/config": "true"},
    },
    "data": {"deviceName": "AMD", "nodeLabelKey": "amd.com/gpu", "nodeLabelValue": "on"},
}


def changed(base: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with one value set, or removed where it is None."""
    found = copy.deepcopy(base)
    *blocks, key = path.split(">")
    block = found
    for name in blocks:
        block = block[name]
    if value is None:
        block.pop(key, None)
    else:
        block[key] = value
    return found


def told(*objects: dict[str, Any]) -> list[str]:
    return faults([Found("f.yaml", each) for each in objects])


def test_other_vendors_devices_pass() -> None:
    assert told(FOREIGN, LABEL) == []


def test_our_own_pass() -> None:
    assert faults(from_files([OWN])) == []


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("metadata>namespace", "default", "metadata.namespace must be kube-public"),
        ("metadata>name", "crl-amd-gpu", "must begin with cf-crl-"),
        ("metadata>name", "cf-crl-other", "must be cf-crl-amd-gpu-<key>"),
        ("metadata>labels>features.cpaas.io/type", None, "features.cpaas.io/type is missing"),
        ("metadata>labels>features.cpaas.io/type", "Limit", "must be CustomResourceLimitation"),
        ("metadata>labels>features.cpaas.io/group", "amd", "they must agree"),
        ("metadata>labels>features.cpaas.io/enabled", True, 'write it in quotes, "true"'),
        ("metadata>labels>features.cpaas.io/enabled", "yes", '"true" or "false"'),
        ("metadata>labels", {}, "the console does not see the object"),
        ("data>key", None, "data.key is missing"),
        ("data>key", "gpu", "must be an extended resource"),
        ("data>key", "kubernetes.io/gpu", "Kubernetes' own"),
        ("data>dataType", "int", "data.dataType must be one of integer"),
        ("data>defaultValue", "one", "must be a whole number"),
        ("data>defaultValue", 1, 'data.defaultValue must be text: write it in quotes, "1"'),
        ("data>limits", "maybe", "disabled, required, optional"),
        ("data>requests", "optional", "disabled, required, fromLimits"),
        ("data>desciptionEn", "x", "data.desciptionEn is not known"),
        ("data>groupI18n", "AMD", "must be JSON"),
        ("data>groupI18n", '{"en": "AMD"}', '"en" and "zh"'),
        ("data>relatedResources", "amd.com/mem", "which no object here defines"),
        ("data>relatedResources", "amd.com/gpu", "the resource itself"),
        ("data>excludeResources", "gpu", "must be an extended resource"),
        ("data>runtimeClassName", "A B", "no name of a RuntimeClass"),
        ("data>ignoreNodeCheck", "yes", "one of true, false"),
    ],
)
def test_each_fault_is_told_once(path: str, value: object, words: str) -> None:
    found = told(changed(FOREIGN, path, value))
    assert len([each for each in found if words in each]) == 1, found
    assert all(each.startswith("f.yaml: ") for each in found)
    assert len(found) == 1, found


def test_an_object_on_both_lists_is_told() -> None:
    both = changed(FOREIGN, "data>relatedResources", "a.com/b")
    other = changed(changed(FOREIGN, "data>key", "a.com/b"), "metadata>name", "cf-crl-amd-gpu-b")
    found = told(changed(both, "data>excludeResources", "a.com/b"), other)
    assert len(found) == 1
    assert "one or the other" in found[0]


def test_one_resource_is_defined_once() -> None:
    found = told(FOREIGN, changed(FOREIGN, "metadata>name", "cf-crl-amd-gpu-again"))
    assert found == [
        "f.yaml: cf-crl-amd-gpu-again: data.key amd.com/gpu is defined by cf-crl-amd-gpu already"
    ]


def test_used_together_means_one_group() -> None:
    other = changed(FOREIGN, "data>key", "amd.com/mem")
    for path, value in (
        ("data>group", "amd-mem"),
        ("metadata>name", "cf-crl-amd-mem"),
        ("metadata>labels>features.cpaas.io/group", "amd-mem"),
    ):
        other = changed(other, path, value)
    found = told(changed(FOREIGN, "data>relatedResources", "amd.com/mem"), other)
    assert len(found) == 1
    assert "another group" in found[0]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("data>deviceName", None, "data.deviceName is missing"),
        ("data>nodeLabelKey", "a b", "cannot stand in a label"),
        ("data>colour", "red", "data.colour is not known"),
        ("metadata>labels>device-plugin.cpaas.io/config", "false", 'must be "true"'),
    ],
)
def test_faults_of_device_labels(path: str, value: object, words: str) -> None:
    (found,) = told(changed(LABEL, path, value))
    assert words in found


def test_one_label_is_offered_once() -> None:
    (found,) = told(LABEL, changed(LABEL, "metadata>name", "cf-crl-amd2-config"))
    assert "offered by cf-crl-amd-config already" in found


def test_other_objects_are_passed_over() -> None:
    assert not concerns({"kind": "ConfigMap", "metadata": {"name": "kube-root-ca.crt"}})
    assert not concerns({"kind": "Secret", "metadata": {"name": "cf-crl-x"}})
    assert concerns(FOREIGN)


def test_command_reads_lists_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = changed(FOREIGN, "data>limits", "maybe")
    listed = {"apiVersion": "v1", "kind": "List", "items": [bad, LABEL]}
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all([listed, {"kind": "Secret"}]))
    assert main(["check", "configmaps", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "2 cf-crl ConfigMaps, 1 faults" in out
    assert f"{tmp_path}/all.yaml: cf-crl-amd-gpu: data.limits" in out


def test_command_without_a_source_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "configmaps"]) == 2
    assert "--cluster" in capsys.readouterr().err


def test_unreadable_files_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.yaml"
    assert main(["check", "configmaps", str(file)]) == 2
    file.write_text("a: [")
    assert main(["check", "configmaps", str(file)]) == 2
    err = capsys.readouterr().err
    assert "cannot be read" in err
    assert "not valid YAML" in err
