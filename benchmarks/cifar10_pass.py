"""What limits each layer of the CIFAR-10 net: its time in a pass, and the time that the machine allows.

    python benchmarks/cifar10_pass.py [--rows 64] [--repeats 40] [--precision fp32]

A pass is that of one of two workers: 64 rows, forward and backward, on one thread. Each layer is measured by
itself on the inputs and gradients that it has in a pass, in rounds of all layers, so that none finds its
memory in the cache. The limit is the longer of two times: that of its arithmetic at the rate of a matrix
product of 1024×1024 in the same precision, and that of reading its inputs and writing its outputs once, at
the rate of a copy. Fourier transforms (conv2 in fp32) need less arithmetic than is counted, so they can be
below it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import samestep
from samestep.recipes.cifar10.recipe import Cifar10Net

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPIED_BYTES = 2**25


@dataclass
class Layer:
    """A layer with what it gets in a pass, and its measured times."""

    name: str
    module: nn.Module
    inputs: Tensor
    gradient: Tensor  # of its outputs
    times_s: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Go forward and backward."""
        self.module(self.inputs).backward(self.gradient)
        for each in (self.inputs, *self.module.parameters()):
            each.grad = None

    @property
    def num_flops(self) -> int:
        """Floating-point operations of matrix products and convolutions, counted the direct way."""
        direct = copy.deepcopy(self.module).double()  # for which nothing goes through Fourier transforms
        inputs = self.inputs.detach().double().requires_grad_(self.inputs.requires_grad)
        with torch.autocast("cpu", enabled=False), FlopCounterMode(display=False) as counter:
            direct(inputs).backward(self.gradient.double())
        return int(counter.get_total_flops())

    @property
    def num_bytes(self) -> int:
        """Bytes that have to be read and written at least: forward x and y; backward dy, x and dx."""
        backward = self.inputs.nbytes * (2 if self.inputs.requires_grad else 1)
        weights = 3 * sum(weight.nbytes for weight in self.module.parameters())
        return self.inputs.nbytes + 2 * self.gradient.nbytes + backward + weights


@contextlib.contextmanager
def precision_of(name: str) -> Iterator[None]:
    """Compute as the recipe does with this precision."""
    with torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16"):
        yield


def layers_of(net: nn.Sequential, num_rows: int) -> list[Layer]:
    """Return the net's layers, with their inputs and outputs' gradients in memory like a pass's."""
    found = []
    values = torch.randn(num_rows, 3, 24, 24).to(memory_format=torch.channels_last)
    for name, module in net.named_children():
        inputs = values.detach().requires_grad_(name != "conv1")
        values = module(inputs)
        found.append(Layer(name, module, inputs, torch.randn_like(values)))
    return found


def seconds(work: Callable[[], object]) -> float:
    """Return how long it takes."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def measure(precision: str, num_rows: int, num_repeats: int) -> None:
    """Print the table of one precision."""
    torch.manual_seed(0)
    net = Cifar10Net()
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    matrix = torch.randn(1024, 1024).to(DTYPES[precision])
    source = torch.randn(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    products_s, copies_s = [], []
    with precision_of(precision):
        layers = layers_of(net, num_rows)
        for _ in range(num_repeats):
            products_s.append(seconds(lambda: torch.mm(matrix, matrix)))
            copies_s.append(seconds(lambda: target.copy_(source)))
            for layer in layers:
                layer.times_s.append(seconds(layer.run))
        flop_s = statistics.median(products_s) / (2 * 1024**3)
        byte_s = statistics.median(copies_s) / (2 * COPIED_BYTES)
        print(f"{precision}: {1e-9 / flop_s:.0f} GFLOP/s, {1e-9 / byte_s:.1f} GB/s; ms of {num_rows} rows")
        totals = [0.0, 0.0]
        for layer in layers:
            took_s = statistics.median(layer.times_s)
            parts_s = {"arithmetic": layer.num_flops * flop_s, "memory": layer.num_bytes * byte_s}
            by, least_s = max(parts_s.items(), key=lambda part: part[1])
            totals = [totals[0] + took_s, totals[1] + least_s]
            print(f"{layer.name:15} {took_s * 1e3:6.2f}   at least {least_s * 1e3:6.2f} by {by}")
    print(f"{'all':15} {totals[0] * 1e3:6.2f}   at least {totals[1] * 1e3:6.2f}")


def main() -> None:
    """Measure both precisions."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--precision", choices=[*DTYPES], help="of the two, only this one")
    arguments = parser.parse_args()
    samestep.init("cpu")
    for precision in [arguments.precision] if arguments.precision else DTYPES:
        measure(precision, arguments.rows, arguments.repeats)


if __name__ == "__main__":
    main()
