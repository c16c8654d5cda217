"""Hypothesis' state machines as tests that run the same steps each time."""

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """Run so many examples of so many steps at most."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            # A failing run is long, and its steps say enough: it is not worth minutes of making it short.
            phases=[Phase.explicit, Phase.generate],
        ),
    )
