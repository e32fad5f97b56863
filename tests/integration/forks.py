"""The process behind `nursery.py`: it imports everything, then forks what requests on stdin ask for."""

import contextlib
import gc
import json
import os
import select
import sys
import traceback
from pathlib import Path
from typing import Any

# What torch imports when the first optimizer is made, and what the first summaries need.
import torch._dynamo
import torch.utils.tensorboard  # noqa: F401
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import samestep.app.evaluation
import samestep.app.training
import samestep.recipes.digits.recipe  # noqa: F401
from samestep.cli import main as samestep_main

sys.path.insert(0, str(Path(__file__).parents[2]))
import tests.integration.hanging  # noqa: F401 - adds its recipe

POLL_S = 0.005


def main() -> None:
    """Serve requests until there are no more."""
    gc.freeze()
    tell(started=[])
    while True:
        if select.select([sys.stdin], [], [], POLL_S)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            serve(json.loads(line))
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                tell(ended=ended[0], status=os.waitstatus_to_exitcode(ended[1]))


def tell(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def serve(request: dict[str, Any]) -> None:
    pids = []
    for number, output in enumerate(request["outputs"]):
        pids.append(os.fork())
        if pids[-1] == 0:
            leave_parent(output)
            try:
                status = {"worker": run_worker, "agent": run_agent}[request["role"]](request, number)
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            os._exit(status)  # taking the interpreter down would take longer than the whole job
    tell(started=pids)


def leave_parent(output: str) -> None:
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)


def run_worker(request: dict[str, Any], number: int) -> int:
    """Be one worker of a job that some launcher has started."""
    os.environ.update(
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE=str(len(request["outputs"])),
        LOCAL_WORLD_SIZE=str(len(request["outputs"])),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(request["port"]),
        TORCHELASTIC_RUN_ID="nursery",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    return samestep_main(request["words"])


def run_agent(request: dict[str, Any], number: int) -> int:
    """Be what `torchrun --nnodes 1:3 --nproc-per-node 1` is, except that workers are forked."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=3,
        nproc_per_node=1,
        run_id=request["outputs"][0].rpartition("/")[0],
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{request['port']}",
        rdzv_configs={"is_host": "0", "last_call_timeout": 1, "keep_alive_interval": 1},
        max_restarts=9,
        start_method="fork",
        local_addr="localhost",
        logs_specs=DefaultLogsSpecs(),
    )
    elastic_launch(config, run_and_exit)(request["words"])
    return 0


def run_and_exit(words: list[str]) -> None:
    status = samestep_main(words)
    sys.stdout.flush()
    os._exit(status) if status else None  # the agent waits for a function to return where it succeeds


if __name__ == "__main__":
    main()
