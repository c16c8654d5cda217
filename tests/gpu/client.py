"""A CUDA process under test: `python -m tests.gpu.client JOB [NUMBER ...]`.

It says `{"ready": ...}` once it has a context, does its job when it reads a line, prints the outcome as one
line of JSON and keeps its context until it reads another line, or the end of its input. `--shm FOLDER` gives
it that folder as /dev/shm and its pipe folder read-only, in a mount namespace of its own, as a container has
them. With `--program` a C program does the job, which keeps to the same lines.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable

from agent.model.cuda import PIPE_DIRECTORY
from agent.mps import launcher
from tests.gpu import cuda as driver
from tests.gpu import kernels, programs
from tests.gpu.cuda import Cuda, CudaError

MIB = 1 << 20
MS_RDONLY = 0x1
WORK_ROUNDS = 100_000  # some milliseconds on the GPUs of 2026
WORK_THREADS = 128
STREAM_BYTES = 512 * MIB  # far beyond the cache of any GPU
BAD_ADDRESS = 0x10
FOLLOW_SECONDS = 10.0

Report = dict[str, object]


def look(cuda: Cuda, _: list[int]) -> Report:
    """The GPU as the process sees it, and the multiprocessors on which its blocks really run."""
    multiprocessors = cuda.attribute(driver.ATTRIBUTE_MULTIPROCESSORS)
    free, total = cuda.memory()
    blocks = 16 * multiprocessors
    out = cuda.allocate(4 * blocks)
    cuda.kernel(kernels.WHERE, "where").run(blocks, 1024, out, 200)
    used = sorted(set(cuda.words(out, blocks)))
    return {
        "multiprocessors": multiprocessors,
        "used": used,
        "free": free,
        "total": total,
        "compute_mode": cuda.attribute(driver.ATTRIBUTE_COMPUTE_MODE),
    }


def allocate(cuda: Cuda, numbers: list[int]) -> Report:
    """Take memory in pieces of NUMBER MiB, then of smaller ones, until none is given; at most NUMBER MiB."""
    piece, most = numbers
    taken, code = 0, 0
    while piece and taken + piece <= most:
        try:
            cuda.fill(cuda.allocate(piece * MIB), 1, piece * MIB // 4)
            taken += piece
        except CudaError as error:
            code = error.code
            piece //= 2
    return {"mebibytes": taken, "code": code}


def memory(cuda: Cuda, _: list[int]) -> Report:
    """The memory of its GPU as the process sees it."""
    free, total = cuda.memory()
    return {"free": free, "total": total}


def nvml(_: Cuda, __: list[int]) -> Report:
    """NVML's figures of the GPU here, as nvidia-smi reads them."""
    found = programs.binding()
    found.open()
    sample = found.sample(os.environ["CUDA_VISIBLE_DEVICES"])
    found.close()
    return {
        "total": sample.memory_total_bytes,
        "used": sample.memory_used_bytes,
        "processes": [each.pid for each in sample.processes or ()],
    }


def follow(cuda: Cuda, numbers: list[int]) -> Report:
    """Take memory as `allocate` does, say so, and after the next line of input try for more for a while."""
    piece, _ = numbers
    _say(allocate(cuda, numbers))
    sys.stdin.readline()
    began = time.perf_counter()
    while True:
        try:
            cuda.allocate(piece * MIB)
        except CudaError as error:
            seconds = time.perf_counter() - began
            if seconds > FOLLOW_SECONDS:
                return {"mebibytes": 0, "code": error.code, "seconds": seconds}
            time.sleep(0.01)
        else:
            return {"mebibytes": piece, "code": 0, "seconds": time.perf_counter() - began}


def fault(cuda: Cuda, _: list[int]) -> Report:
    """Write to an address that is nobody's."""
    kernel = cuda.kernel(kernels.POKE, "poke")
    try:
        kernel.run(1, 1, BAD_ADDRESS, 1)
    except CudaError as error:
        return {"code": error.code}
    return {"code": 0}


def work(cuda: Cuda, numbers: list[int]) -> Report:
    """Run the arithmetic kernel for NUMBER seconds on NUMBER blocks, one launch after the other."""
    seconds, blocks = numbers
    out = cuda.allocate(4 * blocks * WORK_THREADS)
    kernel = cuda.kernel(kernels.WORK, "work")
    return _repeated(lambda: kernel.run(blocks, WORK_THREADS, out, WORK_ROUNDS), seconds)


def stream(cuda: Cuda, numbers: list[int]) -> Report:
    """Run the kernel that is bound by memory for NUMBER seconds on NUMBER blocks."""
    seconds, blocks = numbers
    words = STREAM_BYTES // 4
    data = cuda.allocate(STREAM_BYTES)
    cuda.fill(data, 0, words)
    kernel = cuda.kernel(kernels.STREAM, "stream")
    return _repeated(lambda: kernel.run(blocks, 1024, data, words), seconds)


def _repeated(once: Callable[[], None], seconds: float) -> Report:
    """How often it ran, how long each took in seconds, and the error that ended it (0: none)."""
    taken: list[float] = []
    code = 0
    began = before = time.perf_counter()
    try:
        once()  # the first one pays for loading
        began = before = time.perf_counter()
        while before - began < seconds:
            once()
            now = time.perf_counter()
            taken.append(now - before)
            before = now
    except CudaError as error:
        code = error.code
    taken.sort()
    return {
        "runs": len(taken),
        "seconds": before - began,
        "p50": taken[len(taken) // 2] if taken else None,
        "p99": taken[min(len(taken) - 1, int(0.99 * len(taken)))] if taken else None,
        "code": code,
    }


JOBS = {job.__name__: job for job in (look, allocate, memory, nvml, follow, fault, work, stream)}


def main(arguments: list[str]) -> int:
    """Do one job; 1 where there is no context to be had."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shm")
    parser.add_argument("--library", default="libcuda.so.1")
    parser.add_argument("--program", help="a program that takes this one's place: it is given the library")
    parser.add_argument("job")
    parser.add_argument("numbers", nargs="*")
    options = parser.parse_args(arguments)
    if not options.program and options.job not in JOBS:
        parser.error(f"{options.job} is none of {', '.join(JOBS)}")
    if options.shm:
        pipe = os.environ[PIPE_DIRECTORY]
        launcher.private_mounts("/", options.shm, {launcher.SHARED_MEMORY: options.shm, pipe: pipe})
        flags = launcher.MS_REMOUNT | launcher.MS_BIND | MS_RDONLY
        launcher.mount(ctypes.CDLL(None, use_errno=True), None, pipe, flags)
    if options.program:
        os.execv(options.program, [options.program, options.library, options.job, *options.numbers])
    try:
        cuda = Cuda(options.library)
    except (CudaError, OSError) as error:
        _say({"ready": False, "code": getattr(error, "code", None), "problem": str(error)})
        return 1
    _say({"ready": True})
    sys.stdin.readline()
    try:
        _say(JOBS[options.job](cuda, [int(number) for number in options.numbers]))
    except CudaError as error:
        _say({"code": error.code, "problem": str(error)})
    sys.stdin.readline()
    return 0


def _say(report: Report) -> None:
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
