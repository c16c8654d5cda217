"""The platform's ConfigMaps: right by the rules, the same in chart and folder."""

from agent.check.configmaps import Found, faults
from agent.model.pod import MPS, VGPU
from tests.chart import helm, platform

RESOURCES = {"nvidia.com/gpu", VGPU.core, VGPU.memory, MPS.core, MPS.memory}


def test_all_resources_and_modes_are_offered() -> None:
    data = [each["data"] for each in platform.objects()]
    assert {each["key"] for each in data if "key" in each} == RESOURCES
    labels = {(each["nodeLabelKey"], each["nodeLabelValue"]) for each in data if "nodeLabelKey" in each}
    assert labels == {("nvidia-device-enable", mode) for mode in ("pgpu", "vgpu", "mps")}


def test_they_obey_their_own_rules() -> None:
    assert faults([Found("chart", each) for each in platform.objects()]) == []


def test_every_text_is_there_in_both_languages() -> None:
    for each in platform.objects():
        for kind in ("description", "label"):
            english, chinese = each["data"].get(f"{kind}En", "-"), each["data"].get(f"{kind}Zh", "-")
            assert english
            assert chinese
            assert english.isascii()


def test_both_label_generations_say_the_same() -> None:
    for each in platform.objects():
        labels = each["metadata"]["labels"]
        new = {key.partition("/")[2]: value for key, value in labels.items() if "features.cpaas" in key}
        old = {key.partition("/")[2]: value for key, value in labels.items() if "features.alauda" in key}
        assert new == old
    alone = helm.template(settings=["platform.enabled=true", "platform.legacyLabels=false"])
    assert "alauda" not in str([each["metadata"].get("labels") for each in alone])


def test_a_mode_that_is_off_is_not_offered() -> None:
    made = helm.template(settings=["platform.enabled=true", "vgpu.enabled=false"])
    names = {each["metadata"]["name"] for each in made if each["metadata"]["name"].startswith("cf-crl-")}
    assert names == {"cf-crl-nvidia-gpu", "cf-crl-pgpu-config"}


def test_folder_is_what_the_chart_makes() -> None:
    assert platform.FILE.read_text(encoding="utf-8") == platform.text(), "run: make docs"
