"""Bad values are refused by helm, with a sentence that names the value."""

import pytest

from tests.chart import helm
from tests.chart.helm import HelmRefused

BAD = {
    "wrong type": ('port="many"', ["port", "integer"]),
    "wrong type of a toggle": ('mps.enabled="yes"', ["mps.enabled", "boolean"]),
    "unknown key": ("vgpus.enabled=true", ["vgpus", "not allowed"]),
    "unknown key of the configuration": ("config.vgpu.placment=1", ["placment", "not allowed"]),
    "unknown word": ('config.vgpu.placement="tight"', ["config.vgpu.placement", "binpack"]),
    "out of range": ("config.sampling.intervalSeconds=0", ["intervalSeconds", "0.1"]),
    "no path": ('kubelet.root="kubelet"', ["kubelet.root", "^/"]),
    "no surge": ("maxUnavailable=0", ["maxUnavailable"]),
    "bad duration": ('metrics.podMonitor.interval="soon"', ["metrics.podMonitor.interval"]),
    "bad account": ('policies.choicesAllowed=["it\'s"]', ["policies.choicesAllowed"]),
    "nothing on": (
        ["pgpu.enabled=false", "vgpu.enabled=false"],
        ["nothing would ever be offered", "set at least one to true"],
    ),
    "default mode that is off": ('config.defaultMode="mps"', ["mps.enabled is false", "switch the mode on"]),
    "modes twice": ("config.modes.mps=true", ["config.modes follows from", "mps.enabled"]),
    "port twice": ("config.http.port=80", ["config.http", "port"]),
    "moved folder": ('config.host.run="/x"', ["config.host.run", "mounts"]),
    "scraped twice": (
        ["metrics.podMonitor.enabled=true", "metrics.serviceMonitor.enabled=true"],
        ["scraped twice"],
    ),
    "policy without effect": (
        ["hostNetwork=true", "networkPolicy.enabled=true"],
        ["networkPolicy does not apply", "hostNetwork: false"],
    ),
    "no account": ("serviceAccount.create=false", ["name the account"]),
    "runtime class with mps": (
        ["mps.enabled=true", 'runtimeClassName="nvidia"'],
        ["leave runtimeClassName empty"],
    ),
    "driver root unsaid": (["mps.enabled=true", 'driver.hostRoot="/run/d"'], ["driver.source: host"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_refused_with_a_sentence(name: str) -> None:
    settings, words = BAD[name]
    with pytest.raises(HelmRefused) as refusal:
        helm.template(settings=[settings] if isinstance(settings, str) else settings)
    told = " ".join(str(refusal.value).split())
    assert all(word in told for word in words), told


def test_default_namespace_is_guarded() -> None:
    with pytest.raises(HelmRefused, match="namespace of its own"):
        helm.template(namespace="default")
    assert helm.template(namespace="default", settings=["allowDefaultNamespace=true"])


def test_kubernetes_that_is_too_old_is_refused() -> None:
    with pytest.raises(HelmRefused, match=r"1\.25"):
        helm.template(kubernetes="1.24.0")
