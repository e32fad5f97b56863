"""Rows per second of training on CIFAR-10, end to end: samestep, plain PyTorch, and TensorFlow.

    python benchmarks/cifar10.py [--data-dir data/cifar10] [--tensorflow-python PATH] [--rounds 5]

All programs train the same net on batches of 128 rows with all cores: input and distortions, the step, the
moving average of the weights; samestep also writes its summaries. Its rate is that after step 256: samestep
traces some of the steps before (docs/watched.md), and of 100,000 steps only eight more. A round runs each
program in its own process, one after the other. Plain PyTorch is the obvious program: a Dataset of single
examples in a DataLoader, `LocalResponseNorm`, `DistributedDataParallel`, one thread per worker. The same
rounds measure the machine's matrix products, 1024×1024 on all cores at once with one thread each. A share
of them can be over 100%, because operations on the padding's zeros are counted, and oneDNN skips them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch.utils.flop_counter import FlopCounterMode

import samestep
from samestep.app.hooks import Hooks
from samestep.app.lock import RunLock
from samestep.recipes.cifar10.data import Cifar10, ensure_cifar10
from samestep.recipes.cifar10.recipe import Cifar10Net, Cifar10Settings, loss_of

BATCH_ROWS = 128
WARM_UP_STEPS = {"samestep": 257, "pytorch": 15, "matmul": 15}
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


# ---- samestep ----------------------------------------------------------------------------------------


def ours(arguments: argparse.Namespace, job: samestep.Job, precision: str) -> Generator[None, None, None]:
    """Take steps of the recipe, as in the loop of `samestep train`."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Cifar10Settings(
            towers=arguments.towers or job.world_size,
            autocast="none" if precision == "fp32" else "bf16",
            data_dir=arguments.data_dir,
            run_dir=Path(folder),
        )
        trainer = settings.build(job)
        with RunLock(settings.run_dir, job) as lock, Hooks(trainer, lock) as hooks:
            while True:
                for batch in trainer.loader:
                    hooks.before_step(batch)
                    hooks.after_step(trainer.step(batch))
                    yield


# ---- plain PyTorch -----------------------------------------------------------------------------------


class Pictures(Dataset[tuple[Tensor, int]]):
    """Distorted pictures, one at a time."""

    def __init__(self, records: Cifar10) -> None:
        self.pictures = torch.from_numpy(records.pictures(np.arange(len(records))))
        self.labels = records.labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, example: int) -> tuple[Tensor, int]:
        top, left = torch.randint(0, 9, (2,)).tolist()
        picture = self.pictures[example, :, top : top + 24, left : left + 24].float()
        flip, brightness, contrast = torch.rand(3).tolist()
        if flip < 0.5:
            picture = picture.flip(2)
        picture = picture + (brightness * 126 - 63)
        means = picture.mean((1, 2), keepdim=True)
        picture = (picture - means) * (0.2 + 1.6 * contrast) + means
        std = picture.std(correction=0).clamp(min=picture.numel() ** -0.5)
        return (picture - picture.mean()) / std, self.labels[example]


def plain_net() -> Cifar10Net:
    """Return the net with torch's convolution and normalisation, and each ReLU after its convolution."""
    net = Cifar10Net()
    convolution = nn.Conv2d(64, 64, 5, padding=2)
    convolution.load_state_dict(net.get_submodule("conv2").state_dict())
    net.conv2 = convolution
    norm = partial(nn.LocalResponseNorm, 9, alpha=0.001, beta=0.75, k=1.0)
    net.pool1, net.relu1 = net.relu1, net.pool1
    net.norm1, net.norm2, net.flatten = norm(), norm(), nn.Flatten()
    return net


def plain(arguments: argparse.Namespace, job: samestep.Job, precision: str) -> Generator[None, None, None]:
    """Take steps of a plain PyTorch training loop."""
    dataset = Pictures(Cifar10("train", ensure_cifar10(arguments.data_dir)))
    sampler = DistributedSampler[tuple[Tensor, int]](dataset)
    loader = DataLoader(
        dataset,
        BATCH_ROWS // job.world_size,
        sampler=sampler,
        num_workers=arguments.loader_processes,
        persistent_workers=arguments.loader_processes > 0,
    )
    torch.manual_seed(0)
    net = plain_net()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    replica = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for pictures, labels in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = nn.functional.cross_entropy(replica(pictures), labels) + net.weight_decay()
            loss.backward()
            optimizer.step()
            average.update_parameters(net)
            yield


# ---- the machine -------------------------------------------------------------------------------------


def matmul(_: argparse.Namespace, __: samestep.Job, precision: str) -> Generator[None, None, None]:
    """Multiply matrices of 1024×1024."""
    matrix = torch.randn(1024, 1024).to(DTYPES[precision] or torch.float32)
    while True:
        torch.mm(matrix, matrix)
        yield


MATMUL_FLOPS = 2 * 1024**3


def flops_per_row() -> int:
    """Count a forward and a backward pass, including operations on the padding's zeros."""
    net, rows = plain_net(), 4
    batch = (torch.randn(rows, 3, 24, 24), torch.zeros(rows, dtype=torch.int64))
    with FlopCounterMode(display=False) as counter:
        loss_of(net, batch).backward()
    return int(counter.get_total_flops()) // rows


# ---- measuring ---------------------------------------------------------------------------------------


WORK: dict[str, Callable[[argparse.Namespace, samestep.Job, str], Generator[None, None, None]]] = {
    "samestep": ours,
    "pytorch": plain,
    "matmul": matmul,
}


def be_worker(arguments: argparse.Namespace) -> None:
    """Measure one contender as one of its workers; worker 0 prints the total rate."""
    job = samestep.init("cpu")
    name, precision = arguments.worker.split()
    steps = WORK[name](arguments, job, precision)
    for _ in range(WARM_UP_STEPS[name]):
        next(steps)
    job.barrier()
    start_s = time.perf_counter()
    for _ in range(arguments.steps):
        next(steps)
    rate = torch.tensor(arguments.steps / (time.perf_counter() - start_s))
    dist.all_reduce(rate)
    if job.is_first:
        unit = MATMUL_FLOPS / 1e9 if name == "matmul" else BATCH_ROWS / job.world_size
        print(f"rate {float(rate) * unit:.1f}", flush=True)
    steps.close()
    job.close()


def rate_of(name: str, arguments: argparse.Namespace) -> float:
    """Run one contender by itself, and return the rate in its last line."""
    if name == "tensorflow fp32":
        script = Path(__file__).with_name("cifar10_tensorflow.py")
        command = [str(arguments.tensorflow_python), str(script), str(arguments.data_dir)]
        command += ["--steps", str(arguments.steps)]
    else:
        workers = str(len(os.sched_getaffinity(0)))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers]
        command += [*sys.argv, "--worker", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if "tensorflow" not in name else dict(os.environ)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


def report(rates: dict[str, list[float]]) -> None:
    """Print the table."""
    flops = flops_per_row()
    print(f"{flops / 1e6:.1f} million floating-point operations per row, forward and backward")
    for name, values in rates.items():
        low, middle, high = statistics.quantiles(values, n=4)
        line = f"{name:16} {middle:8.1f} [{low:.1f}, {high:.1f}]"
        if name.startswith("matmul"):
            print(f"{line} GFLOP/s")
            continue
        achieved = [rate * flops / 1e9 for rate in values]
        peak = rates[f"matmul {name.split()[1]}"]
        share = statistics.median(a / b for a, b in zip(achieved, peak, strict=True))
        print(f"{line} rows/s  {statistics.median(achieved):6.1f} GFLOP/s, {share:.0%} of matmul")
    for ours in (name for name in rates if name.startswith("samestep")):
        for other in (name for name in rates if name.startswith(("pytorch", "tensorflow"))):
            ratios = [a / b for a, b in zip(rates[ours], rates[other], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"{ours} / {other}: {middle:.2f} [{low:.2f}, {high:.2f}]")


def main() -> None:
    """Run all contenders in turn, or be a worker of one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=Path("data/cifar10"))
    parser.add_argument("--tensorflow-python", type=Path, help="a Python that has TensorFlow")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="measured in each process")
    parser.add_argument("--towers", type=int, help="of samestep; by default one a worker")
    parser.add_argument(
        "--precisions", nargs="+", choices=DTYPES, default=list(DTYPES), help="slow where the CPU has no bf16"
    )
    parser.add_argument("--loader-processes", type=int, default=0, help="of plain PyTorch, for each worker")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return be_worker(arguments)
    names = [f"{name} {precision}" for precision in arguments.precisions for name in WORK]
    names += ["tensorflow fp32"] if arguments.tensorflow_python else []
    rates: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(arguments.rounds):
        for name in names if round_number % 2 else reversed(names):
            rates[name].append(rate_of(name, arguments))
            print(f"round {round_number}: {name} {rates[name][-1]:.1f}", file=sys.stderr, flush=True)
    return report(rates)


if __name__ == "__main__":
    main()
