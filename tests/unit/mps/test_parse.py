"""Reading the control daemon's words, as real daemons (535, 550) and NVIDIA's documents show them."""

import pytest

from agent.mps import control_commands as answers
from agent.mps.control_commands import ServerState
from agent.mps.mps_errors import DaemonRefused, NotSupported


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("100.0", 100.0),
        ("Invalid percentage, expected between (0.0, 100.0]\n40.0", 40.0),
        ("", None),
        ("Server 1 not found", 1.0),  # `check` raises a refusal, before this
        ("1200", None),
    ],
)
def test_percentage(text: str, found: float | None) -> None:
    assert answers.percentage(text) == found


def test_pids_pass_over_everything_else() -> None:
    assert answers.pids("17797\n  17801 \nServer busy\n\n") == (17797, 17801)
    assert answers.pids("") == ()


@pytest.mark.parametrize("state", list(ServerState))
def test_server_state(state: ServerState) -> None:
    assert answers.server_state(f"Server is {state.value.lower()}\n") is state


def test_words_nobody_knows_are_an_unknown_state() -> None:
    assert answers.server_state("it sleeps") is ServerState.UNKNOWN


def test_refusals_are_told_apart() -> None:
    assert answers.check("get_server_list", "17\n") == "17\n"
    with pytest.raises(NotSupported, match="'get_server_status'"):
        answers.check("get_server_status 1", 'Unknown command "get_server_status"')
    with pytest.raises(DaemonRefused, match="Server 1 not found"):
        answers.check("get_client_list 1", "Server 1 not found\n")


def test_a_sessions_answers_are_told_apart_by_the_question_after_each() -> None:
    said = answers.parts("17797\n100.0\n9741\n9743\n100.0\nACTIVE\n40.0\n")
    assert said == (["17797", "9741\n9743", "ACTIVE"], 40.0)
    assert answers.parts("100.0\n100.0") == (["", ""], 100.0)
    assert answers.parts("") == ([], None)
    assert answers.parts("17797\n100.0\n97")[0] == []  # cut short


@pytest.mark.parametrize("garbage", ["\u00b2", "\u0663\u0664", "9" * 5000, "-5", "\ufffd\ufffd 12", "0x10"])
def test_garbage_is_no_process(garbage: str) -> None:
    assert answers.pids(f"{garbage}\n6472\n") == (6472,)
