"""MPS control daemons of a storm: processes that live in a table, since NVIDIA's know no virtual time.

They answer what the simulator's stand-in answers, and start a server when they are asked to. A daemon
outlives the agent that started it. It may die, hang, or turn callers away; a pod may run one that looks
like it.
"""

import os
import shutil
import signal
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import anyio

from agent.model.cuda import PIPE_DIRECTORY
from agent.mps import connections, control_commands, launch, probing, processes, shared_memory
from agent.mps.binary import Program
from agent.mps.connections import PeersSeen
from agent.mps.directories import SOCKETS, Directories
from agent.mps.launch import Launched
from agent.mps.mps_errors import StartFailed
from agent.mps.processes import Process
from agent.simulator import mps_control

FIRST_PID = 1 << 23  # above any that the kernel gives


class VirtualDaemon:
    """One control daemon, its server, and the server's clients."""

    def __init__(self, table: "DaemonTable", pipe: Path) -> None:
        self.process = table.new_process()
        self.server: Process | None = None
        self.clients: dict[int, str] = {}  # UID of the pod by PID; none: a process outside of pods
        self.faulted = False  # a client's fatal error: no new clients until all have left
        self.pipe = pipe
        self.hangs = False
        self.named = -1.0  # when somebody asked it last who its clients are
        self.forged = False
        self._table = table
        self._answers = mps_control.Daemon()

    @property
    def uuid(self) -> str:
        """The GPU's."""
        return self.pipe.parent.name

    def answer(self, text: str) -> str:
        """The answers to all commands of a session."""
        found = []
        for line in text.splitlines():
            words = line.split()
            if words[:1] == ["start_server"]:
                self.server = self.server or self._table.new_process()
                continue
            if words[:1] == ["quit"]:
                self._table.end(self.process.pid)
                if self.server is not None:
                    self._table.end(self.server.pid)
                continue
            pid = str(self.server.pid) if self.server else ""
            if words[:1] == ["get_client_list"]:
                self.named = anyio.current_time()
            told = {
                ("get_server_list",): pid,
                ("get_server_status", pid): "FAULT" if self.faulted else "ACTIVE",
                ("get_client_list", pid): "\n".join(map(str, self.clients)),
            }.get(tuple(words))
            if words[:2] == ["terminate_client", pid] and words[2:]:
                self.leave(int(words[2]))
                told = "0"
            found.append(self._answers.answer(line) if told is None else told)
        return "\n".join(each for each in found if each)

    def join(self, uid: str, container_id: str, user: int) -> int:
        """A process becomes a client, of a container where `uid` is a pod's; its PID."""
        pid = self._table.new_pid()
        folder = self._table.proc / str(pid)
        folder.mkdir()
        pod = f"kubepods/pod{uid}/{container_id}" if uid else "system.slice/stranger.service"
        (folder / "cgroup").write_text(f"0::/{pod}\n")
        (folder / "status").write_text(f"Name:\tpython\nUid:\t{user}\t{user}\t{user}\t{user}\n")
        self.clients[pid] = uid
        return pid

    def leave(self, pid: int) -> None:
        """A client ends."""
        if self.clients.pop(pid, None) is not None:
            shutil.rmtree(self._table.proc / str(pid))
        self.faulted = self.faulted and bool(self.clients)


class DaemonTable:
    """All processes of MPS on the machine. `proc`: where those of containers are shown."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.daemons: list[VirtualDaemon] = []
        self.refuses = False  # new daemons end at once
        self._alive: dict[int, Process] = {}
        self._next = FIRST_PID
        self._watched: dict[int, list[int]] = {}  # by PID: ends of pipes that close when it ends

    def new_pid(self) -> int:
        """A PID."""
        self._next += 1
        return self._next

    def new_process(self) -> Process:
        """A process that runs."""
        pid = self.new_pid()
        return self._alive.setdefault(pid, Process(pid, pid))

    def identify(self, pid: int) -> Process | None:
        """In place of `processes.identify`."""
        return self._alive.get(pid)

    def end(self, pid: int) -> None:
        """A process ends, as by SIGKILL. A server outlives its daemon, and ends with its clients."""
        self._alive.pop(pid, None)
        for daemon in self.daemons:
            if daemon.server is not None and daemon.server.pid == pid:
                for client in tuple(daemon.clients):
                    daemon.leave(client)
        for descriptor in self._watched.pop(pid, ()):
            os.close(descriptor)

    def reap(self, alive: Collection[str]) -> None:
        """The clients of all pods but these (UIDs) end."""
        for daemon in self.daemons:
            for pid, uid in tuple(daemon.clients.items()):
                if uid and uid not in alive:
                    daemon.leave(pid)

    def close(self) -> None:
        """End all."""
        for pid in [*self._alive, *self._watched]:
            self.end(pid)
        self.daemons.clear()

    def on(self, pipe: Path) -> list[VirtualDaemon]:
        """Daemons on a pipe folder that run, forged ones too."""
        return [each for each in self.daemons if each.pipe == pipe and each.process.pid in self._alive]

    def start(self, folders: Directories) -> VirtualDaemon:
        """A daemon goes into the background."""
        daemon = VirtualDaemon(self, folders.pipe)
        self.daemons.append(daemon)
        for name in SOCKETS:
            _make_socket(folders.own / name)
        folders.show()
        return daemon

    def forge(self, pipe: Path) -> None:
        """A pod runs something that looks like a daemon."""
        daemon = VirtualDaemon(self, pipe)
        daemon.forged = True
        self.daemons.append(daemon)

    # What the agent's rooms call in place of their own.

    def genuine(self, pipe: Path, below: bool = False) -> tuple[Process, ...]:
        """See `processes.daemons`."""
        del below
        return tuple(each.process for each in self.on(pipe) if not each.forged)

    def impostors(self, pipe: Path) -> tuple[Process, ...]:
        """See `processes.impostors`."""
        return tuple(each.process for each in self.on(pipe) if each.forged)

    def servers(self, pipe: Path) -> tuple[Process, ...]:
        """See `processes.servers`."""
        found = (each.server for each in self.daemons if each.pipe == pipe and each.server)
        return tuple(each for each in found if each.pid in self._alive)

    def peers_of(self, pid: int) -> frozenset[int]:
        """See `connections.peers_of`, of a server."""
        mine = (each for each in self.daemons if each.server and each.server.pid == pid)
        return frozenset(client for each in mine for client in each.clients)

    def daemon_of(self, folders: Directories) -> Process | None:
        """See `processes.daemon_of`."""
        return min(self.genuine(folders.pipe), key=lambda each: each.pid, default=None)

    def listener(self, folders: Directories) -> int | None:
        """See `processes.listener`."""
        found = self.daemon_of(folders)
        return found.pid if found else None

    def pidfd_open(self, pid: int) -> int:
        """A descriptor that is readable once the process has ended. Raises ProcessLookupError."""
        if pid not in self._alive:
            raise ProcessLookupError(pid)
        ours, other = os.pipe()
        self._watched.setdefault(pid, []).append(other)
        return ours

    async def session(
        self, program: Path, text: str, environment: Mapping[str, str], *_: object
    ) -> tuple[str, str]:
        """See `agent.mps.control_commands.session`."""
        del program
        own = Path(environment[PIPE_DIRECTORY])
        await anyio.sleep(0.001)
        for daemon in self.on(own.parent / "pipe"):
            if not daemon.forged:
                while daemon.hangs:
                    await anyio.sleep(1.0)
                return daemon.answer(text), ""
        return "", "Cannot find MPS control daemon process"

    async def launch(self, program: Program, folders: Directories, *_: object) -> Launched:
        """See `launch.launch`."""
        await anyio.sleep(0.05)
        if self.refuses:
            raise StartFailed(
                f"{program.path} -d ended with 1: it said nothing; see {folders.log}/control.log"
            )
        self.start(folders)
        return Launched(True, {})


def _make_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.bind(str(path))


def _adopt(pid: int, started: int, folders: Directories) -> bool:
    del pid, started
    folders.show()
    return True


def install(table: DaemonTable) -> None:
    """Put `table` in place of /proc and of NVIDIA's program, for this process."""

    def send(self: Process, number: signal.Signals) -> None:
        del number
        table.end(self.pid)

    stand_ins: dict[ModuleType, dict[str, object]] = {
        processes: {
            "identify": table.identify,
            "daemons": table.genuine,
            "impostors": table.impostors,
            "servers": table.servers,
            "daemon_of": table.daemon_of,
            "listener": table.listener,
            "arguments": lambda _: (mps_control.NAME, "-d", launch.MULTI_USER),
            "kernel_problem": lambda: None,
            "in_pods": lambda pids: any(each.clients.get(pid) for each in table.daemons for pid in pids),
        },
        launch: {
            "launch": table.launch,
            "adopt": _adopt,
            "exposed": lambda _pid, _folders: False,
            "leave_no_cgroup": lambda _cgroups: None,
        },
        control_commands: {"session": table.session},
        probing: {"os": SimpleNamespace(pidfd_open=table.pidfd_open, close=os.close)},
        # Its processes are made up: what has their PIDs on this machine is not to be looked at.
        connections: {
            "peers_of": table.peers_of,
            "SilentPeers": lambda _pipe: SimpleNamespace(look=lambda _: PeersSeen((), None)),
        },
        shared_memory: {
            "prepare": lambda _folders, _size: None,
            "unmount": lambda _folder: None,
            "bound_logs": lambda _folder: None,
            "release_logs": lambda _folder: None,
        },
    }
    for room, names in stand_ins.items():
        for name, stand_in in names.items():
            setattr(room, name, stand_in)
    Process.send = send  # type: ignore[method-assign]
