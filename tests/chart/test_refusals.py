"""Bad values are refused by helm, with a sentence that names the value."""

import json

import pytest

from tests.chart import helm, schema
from tests.chart.helm import HelmRefused

BAD = {
    "wrong type": ('port="many"', ["port", "integer"]),
    "wrong type of a toggle": ('mps.enabled="yes"', ["mps.enabled", "boolean"]),
    "unknown key": ("vgpus.enabled=true", ["vgpus", "not allowed"]),
    "unknown key of the configuration": ("config.vgpu.placment=1", ["placment", "not allowed"]),
    "unknown word": ('config.vgpu.placement="tight"', ["config.vgpu.placement", "binpack"]),
    "out of range": ("config.sampling.intervalSeconds=0", ["intervalSeconds", "0.1"]),
    "no path": ('kubelet.root="kubelet"', ["kubelet.root", "^(/.*)?$"]),
    "no surge": ("maxUnavailable=0", ["maxUnavailable"]),
    "bad duration": ('metrics.podMonitor.interval="soon"', ["metrics.podMonitor.interval"]),
    "bad account": ('policies.choicesAllowed=["it\'s"]', ["policies.choicesAllowed"]),
    "resizers of nothing": (
        ['vgpu.resizers=["alice"]', 'config.vgpu.enforcement="off"'],
        ["vgpu.resizers", "set config.vgpu.enforcement"],
    ),
    "bad resizer": ('vgpu.resizers=["it\'s"]', ["vgpu.resizers"]),
    "resize by everybody": ("config.vgpu.resize=true", ["config.vgpu.resize", "vgpu.resizers"]),
    "compute without the library": (
        ['config.vgpu.compute="hard"', 'config.vgpu.enforcement="report"'],
        ["config.vgpu.compute", "set config.vgpu.enforcement to library or strict"],
    ),
    "ends whom nobody knows": (
        ["attribution.enabled=false", 'config.vgpu.aboveCap="end"'],
        ["config.vgpu.aboveCap", "set attribution.enabled"],
    ),
    "nothing on": (
        ["pgpu.enabled=false", "vgpu.enabled=false"],
        ["nothing would ever be offered", "set at least one to true"],
    ),
    "default mode that is off": ('config.defaultMode="mps"', ["mps.enabled is false", "switch the mode on"]),
    "claims twice": ("config.dra.enabled=true", ["config.dra.enabled", "use the value dra.enabled"]),
    "instances made twice": ("config.mig.manage=true", ["config.mig.manage", "use the value mig.manage"]),
    "instances of a mode that is off": (
        ["mig.manage=true", "mig.enabled=false"],
        ["mig.manage is true and mig.enabled is false"],
    ),
    "instances that nobody makes": (
        'config.layouts={"parts": [{"gpus": [0], "mode": "mig", "mig": ["1g.18gb"]}]}',
        ["config.layouts.parts names MIG instances", "only with mig.manage"],
    ),
    "runtime class with instances": (
        ["mig.manage=true", 'runtimeClassName="nvidia"'],
        ["mig.manage mounts", "leave runtimeClassName empty"],
    ),
    "extended resource of no class": ("dra.extendedResource=true", ["set dra.enabled and dra.classes"]),
    "default mode dra that is off": ('config.defaultMode="dra"', ["dra.enabled is false"]),
    "modes twice": ("config.modes.mps=true", ["config.modes follows from", "mps.enabled"]),
    "port twice": ("config.http.port=80", ["config.http", "port"]),
    "moved folder": ('config.host.run="/x"', ["config.host.run", "mounts", "take it out"]),
    "state beside its value": ('config.host.state="/x"', ["config.host.state", "use the value host.state"]),
    "device root beside its value": ('config.driver.devRoot="/"', ["use the value driver.devRoot"]),
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
    "runtime class with the host's driver": (
        ['driver.source="host"', 'runtimeClassName="nvidia"'],
        ["driver.source: host mounts", "leave runtimeClassName empty"],
    ),
    "default mode that is nothing": (
        'config.defaultMode="mpss"',
        ["neither a mode nor a layout", "use one of none, disable, pgpu, vgpu, mps, mig, dra"],
    ),
    "layout in a mode that is off": (
        'config.layouts={"mixed": [{"gpus": [0], "mode": "mps"}]}',
        ["config.layouts.mixed", "mps.enabled is false", "take it out of the layout"],
    ),
    "layout named like a mode": (
        'config.layouts={"vgpu": [{"gpus": [0], "mode": "pgpu"}]}',
        ["config.layouts.vgpu", "call the layout otherwise"],
    ),
    "layout with a name that is read as a mode": (
        'config.layouts={"enable": [{"gpus": [0], "mode": "pgpu"}]}',
        ["config.layouts.enable", "call the layout otherwise"],
    ),
    "empty layout": ('config.layouts={"idle": []}', ["config.layouts.idle has no entry"]),
    "image with a scheme": ('image.repository="https://reg.example/x"', ["image.repository", "https://"]),
    "image with a tag": ('image.repository="reg.example:5000/x:1.0"', ["image.repository", "set image.tag"]),
    "image with a digest": (
        'image.repository="reg.example/x@sha256:0"',
        ["image.repository", "set image.tag"],
    ),
    "name with capitals": ('fullnameOverride="GPU_Agent"', ["fullnameOverride", 'use "gpu-agent"']),
    "no quantity": ('resources.limits={"memory": "much"}', ["resources.limits.memory", "256Mi"]),
    "timeout beyond the interval": (
        ["metrics.podMonitor.enabled=true", 'metrics.podMonitor.scrapeTimeout="1m"'],
        ["scrapeTimeout (1m)", "interval (30s)"],
    ),
    "everybody's account": ('serviceAccount.name="default"', ["give the agent one of its own"]),
    "variable of the chart's": (
        'extraEnv=[{"name": "GPU_NODE_AGENT_CONFIG", "value": "/x"}]',
        ["GPU_NODE_AGENT_CONFIG", "take it out"],
    ),
    "unknown key of the extender": ('extender.config={"placment": "spread"}', ["placment", "not allowed"]),
    "extender's port": (
        'extender.config={"http": {"port": 9000}}',
        ["extender.config.http.port", "take it out"],
    ),
    "an extender that nobody can ask": (
        ["extender.enabled=true"],
        ["how kube-scheduler may ask", "extender.tls.secret", "extender.config.http.verbs: true"],
    ),
    "services without verbs": (
        [
            "extender.enabled=true",
            "extender.productServices=true",
            'extender.tls.secret="pki"',
        ],
        ["extender.productServices leads to", "extender.config.http.verbs: true"],
    ),
    "https by hand": ("config.https.port=9447", ["use metrics.access instead"]),
    "readers of what all may read": ('metrics.access.readers=["a:b"]', ["set metrics.access.secret"]),
    "one port for two": (
        ['metrics.access.secret="pki"', "metrics.access.port=9446"],
        ["metrics.access.port and port are both 9446"],
    ),
    "quota for no class": (
        ["priorityClassQuota.enabled=true", 'priorityClassName=""'],
        ["no pod has a priority class", "leave it off"],
    ),
    "services of nobody": ("extender.productServices=true", ["set extender.enabled to true"]),
    "driver root unsaid": (["mps.enabled=true", 'driver.hostRoot="/run/d"'], ["driver.source: host"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_refused_with_a_sentence(name: str) -> None:
    settings, words = BAD[name]
    with pytest.raises(HelmRefused) as refusal:
        helm.template(settings=[settings] if isinstance(settings, str) else settings)
    told = " ".join(str(refusal.value).split())
    assert all(word in told for word in words), told


MISPLACED = {
    'vgpu.enforcement="off"': "set config.vgpu.enforcement",
    'mps.rootPods="refuse"': "set config.mps.rootPods",
    'defaultMode="vgpu"': "set config.defaultMode",
    "injection.deviceNodes=true": "set config.injection",
    "metrics.gpuManagerNames=true": "set config.metrics.gpuManagerNames",
}


@pytest.mark.parametrize("setting", MISPLACED)
def test_helm_names_the_right_key(setting: str) -> None:
    """Of the configuration, in the wrong place; what is no key of either stays refused by the schema."""
    with pytest.raises(HelmRefused) as refusal:
        helm.template(settings=[setting])
    told = " ".join(str(refusal.value).split())
    assert MISPLACED[setting] in told, told
    first, *rest = setting.split(".", 1)
    with pytest.raises(HelmRefused, match="not allowed"):
        helm.template(
            settings=[f"{first}.x{rest[0]}" if first in ("vgpu", "mps", "metrics") else f"x{setting}"]
        )


def test_every_misplaced_key_has_a_hint() -> None:
    document = json.loads(schema.FILE.read_text(encoding="utf-8"))
    assert schema.ELSEWHERE.read_text(encoding="utf-8") == schema.elsewhere(document)
    assert document == schema.updated(document)


GOOD = {
    "layout": [
        'config.layouts={"mixed": [{"gpus": ["0-3"], "mode": "vgpu"}, {"gpus": ["rest"], "mode": "off"}]}',
        'config.defaultMode="mixed"',
    ],
    "timeout within the interval": [
        "metrics.podMonitor.enabled=true",
        'metrics.podMonitor.interval="1m500ms"',
        'metrics.podMonitor.scrapeTimeout="60s"',
    ],
    "quantities": ['resources={"limits": {"cpu": 1, "memory": "0.5Gi"}, "requests": {"cpu": "50m"}}'],
    "extender": [
        "extender.enabled=true",
        'extender.tls.secret="pki"',
        'extender.config={"http": {"verbs": false}, "placement": "spread"}',
    ],
    "image with a port": ['image.repository="reg.example:5000/team/gpu-node-agent"'],
}


@pytest.mark.parametrize("name", GOOD)
def test_what_looks_like_it_is_not_refused(name: str) -> None:
    assert helm.template(settings=GOOD[name])


def test_default_namespace_is_guarded() -> None:
    with pytest.raises(HelmRefused, match="namespace of its own"):
        helm.template(namespace="default")
    assert helm.template(namespace="default", settings=["allowDefaultNamespace=true"])


def test_resizers_are_refused_where_no_policy_could_hold_the_others() -> None:
    wanted = ['vgpu.resizers=["alice"]']
    with pytest.raises(HelmRefused, match=r"vgpu\.resizers needs Kubernetes 1\.30"):
        helm.template(settings=wanted, kubernetes="1.29.0")


def test_kubernetes_that_is_too_old_is_refused() -> None:
    with pytest.raises(HelmRefused, match=r"1\.25"):
        helm.template(kubernetes="1.24.0")


def test_claims_are_refused_where_kubernetes_is_too_old_for_them() -> None:
    with pytest.raises(HelmRefused, match=r"dra\.enabled needs Kubernetes 1\.36\.5"):
        helm.template(settings=["dra.enabled=true"], kubernetes="1.36.3")
