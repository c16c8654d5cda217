"""Output of MPS daemons and servers. Tenants have a hand in it: names of processes, any line of a log."""

from pathlib import Path

from agent.mps import control_commands
from agent.mps.daemon_logs import ServerLog, Tail, writer
from agent.mps.mps_errors import MpsError
from tests.fuzz.campaign import Campaign

ANSWERS = (
    b"100.0\n",
    b"2134\n",
    b"ACTIVE\n",
    b"1024M\n",
    b"Client 4711 of server 99 not found\n",
    b"Unknown command: ps\n",
    b"9" * 5000 + b"M\n",  # more digits than int() takes
    (
        b"PID     ID    SERVER    DEVICE             NAMESPACE      COMMAND\n"
        b"9741    0     6472      GPU-cb1213a3-d6a4-be7f 4026531836  ./nbody -benchmark\n"
        b"9743    0     6472      GPU-cb1213a3-d6a4-be7f 4026531836  python train.py\n"
    ),
    b"[2026-11-22 01:02:03.456 Control  4711] Starting control daemon\n100.0\n",
)
WORDS = (
    b"PID",
    b"SERVER",
    b"COMMAND",
    b"FAULT",
    b"INITIALIZING",
    b"100.0\n",
    b"G",
    b"KiB",
    b"not found",
    b" ",
)


def test_control_daemon_answers(campaign: Campaign) -> None:
    def act(data: bytes) -> str:
        text = data.decode(errors="replace").strip()
        parts, default = control_commands.parts(text)
        assert default is None or 0 <= default < 1000
        for each in (text, *parts):
            assert all(0 <= pid < 1 << 34 for pid in control_commands.pids(each))
            percentage = control_commands.percentage(each)
            assert percentage is None or 0 <= percentage <= 100
            assert isinstance(control_commands.server_state(each), control_commands.ServerState)
        try:
            control_commands.check("get_server_list", text)
        except MpsError:
            return "refused"
        return "read"

    campaign.run(act, ANSWERS, WORDS)


LINES = (
    b"[2026-11-22 01:02:03.456 Control  4711] User did not send valid credentials\n",
    b"[2026-11-22 01:02:03.456 Control  4711] Accepting connection...\n",
    (
        b"[2026-11-22 01:02:03.456 Server  4712] Received new client request\n"
        b"[2026-11-22 01:02:03.456 Server  4712] Creating server context on device 0 (NVIDIA H200)\n"
    ),
    (
        b"[2026-11-22 01:02:03.456 Server  4712] Client {7001, 1} encountered a fatal GPU error.\n"
        b"[2026-11-22 01:02:03.456 Server  4712] Handling a sticky error of {7002, 2}\n"
    ),
    b"[2026-11-22 01:02:03.456 Control  4711] Server 4712 exited with status 1\n",
    b"[" + b"9" * 20000 + b":02:03.456 Control  4711] took minutes to match\n",
    b"[2026-11-22 01:02:03.456 Control  " + b"9" * 5000 + b"] fatal GPU error {" + b"9" * 5000 + b", 1}\n",
)


def test_mps_logs(campaign: Campaign, tmp_path: Path) -> None:
    file = tmp_path / "control.log"
    file.touch()
    tail, log = Tail(file), ServerLog()

    def act(data: bytes) -> str:
        with file.open("ab") as appended:
            appended.write(data)
        lines = tail.lines()
        for line in lines:
            pid = writer(line)
            assert pid is None or pid >= 0
        log.feed(lines)
        assert all(pid > 0 for pid in log.culprits)
        return "fault" if log.fault else "no fault"

    campaign.run(act, LINES, (b"{", b"}", b"[", b"]", b"fatal GPU error", b"exited with status ", b"Server "))
    assert not tail.lines()
