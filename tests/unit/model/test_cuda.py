"""CUDA compatibility: the product's rules, and where NVIDIA's own are milder."""

import pytest

from agent.model.cuda import SERVED, DriverFacts, Level, findings, parse_driver, parse_version, verdict

CASES: list[tuple[str, str, str, Level, str]] = [
    ("12.4", "550.144.03", "pgpu", Level.ALLOWED, "no newer"),
    ("11.8", "12.4", "pgpu", Level.ALLOWED, "no newer"),
    ("11.8", "13.0", "pgpu", Level.UNSTABLE, "more than one major version"),
    ("12.6", "12.4", "pgpu", Level.UNSTABLE, "(222)"),
    ("13.0", "12.9", "pgpu", Level.BLOCKED, "(999)"),
    ("13.0", "570.86.10", "pgpu", Level.BLOCKED, "580"),
    ("12.4", "550.1.1", "vgpu", Level.ALLOWED, "very baseline"),
    ("12.2", "12.8", "vgpu", Level.ALLOWED, "within the baseline"),
    ("12.6", "12.8", "vgpu", Level.BLOCKED, "100 cores"),
    ("11.8", "12.4", "vgpu", Level.UNSTABLE, "case by case"),
    ("11.7", "12.4", "vgpu", Level.BLOCKED, "one major version"),
    ("12.4", "13.0", "vgpu", Level.BLOCKED, "one major version"),
    ("11.4", "470.57.02", "mps", Level.BLOCKED, "11.5"),
    ("12.0", "535.129.03", "mps", Level.ALLOWED, "what MPS needs"),
]


@pytest.mark.parametrize(("runtime", "driver", "mode", "level", "words"), CASES)
def test_rules(runtime: str, driver: str, mode: str, level: Level, words: str) -> None:
    found = findings(parse_version(runtime), parse_driver(driver), mode)
    assert verdict(found) is level
    assert any(words in each.text for each in found)


@pytest.mark.parametrize(
    ("runtime", "driver"), [("12.6", "12.8"), ("12.9", "12.9"), ("13.0", "13.0"), ("12.4", "13.0")]
)
def test_the_baseline_of_vgpu_holds_only_where_a_library_makes_it_so(runtime: str, driver: str) -> None:
    asked = parse_version(runtime), parse_driver(driver)
    assert verdict(findings(*asked, "vgpu", hooked=True)) is Level.BLOCKED
    found = findings(*asked, "vgpu", hooked=False)
    assert verdict(found) is Level.ALLOWED
    assert any("no library with the baseline 12.4 is loaded" in each.text for each in found)
    # What blocks whole GPUs blocks fractions as well.
    assert verdict(findings((13, 0), parse_driver("12.9"), "vgpu", hooked=False)) is Level.BLOCKED


def test_mps_needs_volta() -> None:
    driver = DriverFacts((12, 4), 550)
    assert verdict(findings((12, 0), driver, "mps", (6, 1))) is Level.BLOCKED
    assert verdict(findings((12, 0), driver, "mps", (7, 0))) is Level.ALLOWED


def test_minor_versions_need_the_floor_of_their_major() -> None:
    assert verdict(findings((12, 1), DriverFacts((12, 0), 520), "pgpu")) is Level.BLOCKED


@pytest.mark.parametrize(
    ("text", "cuda"),
    [("550.144.03", (12, 4)), ("552.10", (12, 4)), ("580.95.05", (13, 0)), ("12.2", (12, 2))],
)
def test_a_driver_is_known_by_its_branch(text: str, cuda: tuple[int, int]) -> None:
    assert parse_driver(text).cuda == cuda


@pytest.mark.parametrize("text", ["", "twelve", "12", "12.4.1.1", "v12.4"])
def test_bad_versions_name_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"12\.4"):
        parse_version(text)


@pytest.mark.parametrize("text", ["", "r550", "390.1"])
def test_bad_drivers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"driver"):
        parse_driver(text)


def test_newer_drivers_serve_newer_cuda() -> None:
    served = [SERVED[branch] for branch in sorted(SERVED)]
    assert served == sorted(set(served))
