"""Faults that are put back into a copy of the agent, and the storms that find them: see `mutants/`."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATCHES = Path(__file__).parent / "mutants"
MOST_STEPS = 20_000


@dataclass(frozen=True)
class Hunt:
    """The storm in which a mutant was found first: it is looked for there, then in later seeds."""

    seed: int
    steps: int  # of each storm
    words: str  # what is found says one of these, parted by |
    faults: str | None = None  # families of faults; None: the seed's own choice


# Those that issue 17 names; every run looks for them. `make storm` looks for all.
NAMED = {
    "freed_units_listed_late": Hunt(203, 60, "was refused though it fits"),
    "init_containers_hold_nothing": Hunt(11, 120, "was refused though it fits"),
    "taint_kept_while_the_watch_is_silent": Hunt(12, 60, "the taint has stood", "api silent,labels"),
    "sigterm_waits_for_an_unserved_pod": Hunt(6, 300, "did not end in time after SIGTERM"),
    "gpu_assigned_written_too_early": Hunt(1, 300, "gpu-assigned was written"),
    "config_hash_believed": Hunt(11, 300, "is held as", "forgeries,labels,kubelet"),
}
OTHERS = {
    "promises_outlive_their_pods": Hunt(512, 80, "was refused though it fits"),
    "reporter_compares_without_end": Hunt(17, 120, "rounds of the loop within a second"),
}
HUNTS = NAMED | OTHERS


class DoesNotApply(Exception):
    """A patch is to be written again for the code as it is."""


def hunt(mutant: str, folder: Path, steps: int, *, seconds: float = 3600.0) -> tuple[bool, str]:
    """Whether a storm finds a mutant within so many steps, and what was said. Raises DoesNotApply."""
    wanted = HUNTS[mutant]
    for name in ("agent", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    patch = ["git", "apply", "-C1", "--recount", "--unsafe-paths", f"--directory={folder}"]
    applied = subprocess.run(
        [*patch, str(PATCHES / f"{mutant}.patch")], cwd=folder, capture_output=True, text=True, check=False
    )
    if applied.returncode:
        raise DoesNotApply(f"{mutant} no longer applies: {applied.stderr}")
    arguments = ["--seed", str(wanted.seed), "--seeds", str(max(1, steps // wanted.steps)), "--until-found"]
    arguments += ["--steps", str(wanted.steps), *(("--faults", wanted.faults) if wanted.faults else ())]
    done = subprocess.run(
        [sys.executable, "-m", "tests.storm", *arguments, "--no-shrink"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    said = done.stdout + done.stderr[-1000:]
    return done.returncode == 1 and any(each in done.stdout for each in wanted.words.split("|")), said
