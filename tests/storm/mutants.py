"""Faults that are put back into a copy of the agent, and the storms that find them: see `mutants/`."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.storm.tempo import SPARSE

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
    tempo: str = SPARSE


# Those that issue 17 names; every run looks for them. `make storm` looks for all.
NAMED = {
    "freed_units_listed_late": Hunt(
        6, 150, "was refused though it fits|nobody is offered it", "none", "bursts"
    ),
    "init_containers_hold_nothing": Hunt(14, 250, "was refused though it fits", "none"),
    "taint_kept_while_the_watch_is_silent": Hunt(
        3, 100, "the taint has stood|API writes in a minute", "api silent,labels"
    ),
    "sigterm_waits_for_an_unserved_pod": Hunt(
        4,
        50,
        "did not end in time after SIGTERM",
        "agent terminated,agent updated,api slow,labels,api silent",
    ),
    "gpu_assigned_written_too_early": Hunt(4, 50, "gpu-assigned was written", "none"),
    "config_hash_believed": Hunt(2, 100, "is held as", "forgeries,labels,kubelet"),
}
OTHERS = {
    "second_half_from_any_gpu": Hunt(5, 150, "was refused though it fits", "none"),
    "drains_nobody": Hunt(1, 150, "is held as", "labels"),
    "drain_ends_at_once": Hunt(1, 150, "is held as", "labels"),
    "restart_forgets_holders": Hunt(1, 150, "is held as", "agent killed,labels"),
    "taint_is_never_dropped": Hunt(1, 150, "the taint has stood", "labels"),
    "two_agents_at_once": Hunt(1, 150, "task|ended by itself", "agent updated,labels"),
    "compute_mode_is_kept": Hunt(1, 150, "EXCLUSIVE_PROCESS", "mps daemons,labels"),
    "outdated_watch_is_resumed": Hunt(2, 150, "should be on offer", "api refuses,api away"),
    "hung_call_stops_the_lane": Hunt(1, 150, "rounds of the loop", "nvml"),
    "pod_uids_are_forgotten": Hunt(1, 200, "is held as", "kubelet,labels"),
    "agent_gives_up_waiting": Hunt(1, 100, "another agent serves", "agent updated,api slow,labels"),
    "torn_checkpoint_is_a_surprise": Hunt(1, 100, "task holdings failed", "files torn"),
    "torn_verdicts_are_a_surprise": Hunt(1, 100, "the agent ended by itself", "files torn,gpus"),
    "watches_are_called_without_a_pause": Hunt(1, 100, "rounds of the loop", "api away"),
    "events_expect_no_failure": Hunt(1, 100, "task events failed", "api away,gpus"),
    "scanner_expects_no_failure": Hunt(2, 100, "task scanner failed", "nvml,gpus"),
    "compute_mode_is_never_set": Hunt(1, 100, "EXCLUSIVE_PROCESS", "mps daemons,labels"),
    "gone_objects_stay": Hunt(1, 100, "is gone, and the agent knows it", "api silent,labels"),
    "mute_watch_is_borne": Hunt(1, 150, "to the agent it is", "api silent,labels"),
    "inherited_units_are_refused": Hunt(4, 100, "was refused though it fits", "none"),
    "held_units_are_given_again": Hunt(
        5, 400, "is held by pods|was refused though it fits", "kubelet", "bursts"
    ),
    "choices_are_written_without_a_pause": Hunt(3, 100, "was tried 5 times", "api refuses"),
    "dead_daemon_is_not_noticed": Hunt(
        3, 150, "nobody is offered it|has no MPS daemon|should be on offer", "mps daemons"
    ),
    "daemon_outlives_its_mode": Hunt(5, 40, "MPS daemon", "mps daemons,labels"),
    "grown_units_are_offered": Hunt(6, 150, "a container has grown by it", "resizes"),
    "registers_once": Hunt(2, 100, "nobody is offered it|should be on offer", "streams dropped"),
    "hung_daemon_is_borne": Hunt(35, 150, "hangs and is not replaced", "mps daemons"),
    "promises_outlive_their_pods": Hunt(4, 200, "was refused though it fits", "none", "bursts"),
    "probation_never_ends": Hunt(1, 150, "does not come back", "gpus", "bursts"),
    "reporter_compares_without_end": Hunt(5, 100, "rounds of the loop", "api refuses,labels"),
}
# Those of issue 33 were chosen before any of them was tried; twelve with these.
HOLDERS = {
    "unheard_pods_hold_nothing": Hunt(
        1, 300, "is held as|was removed|is held by pods", "kubelet blind,labels,tenants", "dense"
    ),
    "promises_are_known_by_their_units": Hunt(4, 300, "was granted to", "tenants", "dense"),
    # This one came with its act, later.
    "processes_end_with_their_pods": Hunt(1, 300, "is offered, and process", "processes hang", "dense"),
}
# Found by tests of their rooms, in milliseconds: files below `tests`, and names. Storms met none of them
# within 2,400 steps.
BY_TESTS = {
    "one_listed_pod_vouches_for_all": "unit/holdings/test_record.py::test_blind_kubelet_forgets_nobody",
    "a_reading_spans_a_restart": "unit/holdings/test_record.py::test_kubelet_restarts_during_a_reading",
    "older_readings_replace_newer_ones": (
        "unit/holdings/test_record.py::test_an_answer_that_comes_late_does_not_replace_a_newer_one"
    ),
    "older_objects_replace_newer_ones": (
        "component/cluster/test_api.py::test_a_write_needs_no_watch_to_be_known"
    ),
    "grants_do_not_hold_a_draining_gpu": (
        "unit/modes/test_transition.py::test_a_gpu_that_drains_waits_for_a_grant_that_no_record_shows_yet"
    ),
    "limits_go_with_the_record": "unit/vgpu/test_room.py::test_limits_stay_while_the_container_runs",
    "promised_units_are_free": (
        "unit/pairing/test_calls.py::test_two_allocates_at_once_are_served_one_after_the_other"
    ),
    "granted_gpus_are_forgotten": "unit/whole/test_plugin.py::test_held_units_are_never_handed_out_again",
    # These two tests were written because nothing had found the mutants.
    "ending_pods_ask": "unit/pairing/test_askers.py::test_a_pod_that_ends_asks_for_nothing",
    "rejected_pods_keep_their_promise": (
        "unit/pairing/test_ended.py::"
        "test_a_rejected_pods_promise_ends_with_its_status_though_the_kubelet_lists_it"
    ),
}
# Found by the first storms with claims (DRA), before they were mutants.
CLAIM_FAULTS = (
    "claims,claims meddled with,labels,gpus,nvml,agent killed,agent terminated,agent updated,kubelet,"
    "api away,api refuses,api slow,api silent,mps daemons"
)
CLAIMS = {
    "devices_leave_with_their_gpu": Hunt(1, 150, "has left the list", "claims,labels", "dense"),
    "claims_choose_nothing_over_a_restart": Hunt(401, 100, "runs claims as", CLAIM_FAULTS, "dense"),
}
# Both are found by the storm with instances of every run.
INSTANCES = {
    "held_instances_are_destroyed": Hunt(7, 150, "was destroyed, and pod", "instances,labels", "dense"),
    "leaving_instances_stay_on_offer": Hunt(7, 150, "is to be destroyed", "instances,labels", "dense"),
}
HUNTS = NAMED | OTHERS | HOLDERS | CLAIMS | INSTANCES


class DoesNotApply(Exception):
    """A patch is to be written again for the code as it is."""


def _made(mutant: str, folder: Path) -> None:
    for name in ("agent", "tests", "proto"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    patch = ["git", "apply", "-C1", "--recount", "--unsafe-paths", f"--directory={folder}"]
    applied = subprocess.run(
        [*patch, str(PATCHES / f"{mutant}.patch")], cwd=folder, capture_output=True, text=True, check=False
    )
    if applied.returncode:
        raise DoesNotApply(f"{mutant} no longer applies: {applied.stderr}")


def run_its_test(mutant: str, folder: Path, *, seconds: float = 280.0) -> tuple[bool, str]:
    """Whether its room's test fails by a mutant, and what was said. Raises DoesNotApply."""
    _made(mutant, folder)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{BY_TESTS[mutant]}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode == 1, done.stdout + done.stderr[-1000:]


def hunt(mutant: str, folder: Path, steps: int, *, seconds: float = 3600.0) -> tuple[bool, str]:
    """Whether a storm finds a mutant within so many steps, and what was said. Raises DoesNotApply."""
    wanted = HUNTS[mutant]
    _made(mutant, folder)
    arguments = ["--seed", str(wanted.seed), "--seeds", str(max(1, steps // wanted.steps)), "--until-found"]
    arguments += ["--tempo", wanted.tempo]
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
