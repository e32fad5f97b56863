"""The process behind `nursery.py`: it imports everything, then forks what requests on stdin ask for."""

import functools
import gc
import importlib
import itertools
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# What torch imports when the first optimizer is made, what the first summaries need, and torchrun.
import torch._dynamo
import torch.distributed as dist
import torch.distributed.run
import torch.utils.tensorboard  # noqa: F401
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import samestep

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.integration import hanging

HOUSE = Path(samestep.__file__).parent
for file in HOUSE.rglob("*.py"):
    parts = file.relative_to(HOUSE).with_suffix("").parts
    if parts[0] != "integrations" and not parts[-1].startswith("__"):  # Transformers is large
        importlib.import_module(".".join(("samestep", *parts)))

POLL_S = 0.005


def main() -> None:
    """Serve requests until there are no more."""
    gc.freeze()
    tell(started=[])
    has_children = False
    while True:
        if select.select([sys.stdin], [], [], POLL_S if has_children else None)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            serve(json.loads(line))
        has_children = True
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                tell(ended=ended[0], status=os.waitstatus_to_exitcode(ended[1]))
        except ChildProcessError:
            has_children = False


def tell(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def serve(request: dict[str, Any]) -> None:
    role = {"program": run_program, "worker": run_worker, "agent": run_agent}[request["role"]]
    tell(started=[start(role, request, number) for number in range(len(request["outputs"]))])


def start(role: Callable[[dict[str, Any], int], None], request: dict[str, Any], number: int) -> int:
    """Fork a process that plays a role; return its id."""

    def play() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells disable in the background
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this one
        output = request["outputs"][number]
        redirect({0: os.devnull, 1: output, 2: f"{output}.errors"})
        os.environ.update(request["environment"])
        role(request, number)

    return fork(play)


def fork(play: Callable[[], None]) -> int:
    """Fork a process that does what `play` does and ends as Python does; return its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside threads, which the child does not use
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            forget_what_is_drawn()
            status = status_of(play)
            sys.stdout.flush()
        finally:
            os._exit(status)  # taking the interpreter down would take longer than the whole job
    return pid


def forget_what_is_drawn() -> None:
    """Seed what a new Python seeds by itself: processes may not agree by chance."""
    random.seed()
    np.random.seed()
    tempfile.tempdir = None


def status_of(play: Callable[[], None]) -> int:
    """Return the exit status that Python would end with, and write what it would write."""
    try:
        play()
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def redirect(files: dict[int, str]) -> None:
    for descriptor, name in files.items():
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)


def run_python(command: Sequence[str]) -> None:
    """Do what `python COMMAND` does, where COMMAND is `-m MODULE ...` or `FILE ...`."""
    command = [word for word in command if word != "-u"]
    sys.orig_argv[:] = [sys.executable, *command]
    if command[0] == "-m":
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


# ---- the roles ---------------------------------------------------------------------------------------


def run_program(request: dict[str, Any], number: int) -> None:
    """Be what a user starts. A launcher among them forks its workers, too, ours and torchrun."""
    samestep.app.launching.supervisor.subprocess = Forks
    subprocess_handler.Popen = Fork
    # In each fork, libuv closes the pipe that it had before, whatever has its numbers since `as_after_exec`.
    samestep.workers.store.TCPStore = functools.partial(dist.TCPStore, use_libuv=False)
    run_python(request["command"])


def run_worker(request: dict[str, Any], number: int) -> None:
    """Be one worker of a job that some launcher has started."""
    os.environ.update(
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE=str(len(request["outputs"])),
        LOCAL_WORLD_SIZE=str(len(request["outputs"])),
        TORCHELASTIC_RUN_ID="nursery",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    run_python(request["command"])


def run_agent(request: dict[str, Any], number: int) -> None:
    """Be what `torchrun --nnodes 1:3 --nproc-per-node 1` is, except that workers are forked."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=3,
        nproc_per_node=1,
        run_id=request["outputs"][0].rpartition("/")[0],
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{os.environ['MASTER_PORT']}",
        rdzv_configs={"is_host": "0", "last_call_timeout": 1, "keep_alive_interval": 1},
        max_restarts=9,
        start_method="fork",
        local_addr="localhost",
        logs_specs=DefaultLogsSpecs(),
    )
    elastic_launch(config, run_and_exit)(request["command"])


def run_and_exit(command: list[str]) -> None:
    status = status_of(lambda: run_python(command))
    sys.stdout.flush()
    os._exit(status) if status else None  # the agent waits for a function to return where it succeeds


class Fork(subprocess.Popen):
    """What the launcher starts `python COMMAND` with, as a copy of the launcher's own process."""

    def _execute_child(self, args: Sequence[str], *others: Any) -> None:
        assert args[0] == sys.executable
        kept, environment = others[3], others[5]

        def play() -> None:
            os.setsid()
            as_after_exec(environment, kept)
            run_python(args[1:])

        self.pid = fork(play)
        self._child_created = True


class Forks:
    Popen = Fork


def as_after_exec(environment: dict[str, str], kept: Sequence[int]) -> None:
    """Leave behind what a new program does not get: open files, environment, handlers of signals, counts."""
    ends = [2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for before, after in itertools.pairwise(ends):
        os.closerange(before + 1, after)
    os.environ.clear()
    os.environ.update(environment)
    samestep.app.launching.script._Calls.of_process.cache_clear()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    hanging.add()
    main()
