"""Models with planted faults: each breaks the promise in one way, in its module 1."""

import os
import random
import threading
import time
import warnings
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

WIDTH = 6
DRAWN_AT_IMPORT = np.random.default_rng().normal()
GENERATOR = torch.Generator().manual_seed(3)


class Clean(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x) + random.random() + np.random.normal()  # from the tower's streams


class OwnDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.stream = torch.Generator().manual_seed(1)

    def forward(self, x):
        return x * torch.bernoulli(torch.full_like(x, 0.5), generator=self.stream)


class GlobalGenerator(nn.Module):
    def forward(self, x):
        return x + torch.rand(x.shape, generator=GENERATOR)


class NumpyGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.stream = np.random.default_rng(1)

    def forward(self, x):
        return x + torch.from_numpy(self.stream.normal(size=WIDTH).astype(np.float32))


class PythonGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.stream = random.Random(1)

    def forward(self, x):
        return x * self.stream.random()


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class Branch(Counter):
    def forward(self, x):
        self.calls += 1
        return x.tanh() if self.calls % 2 else x.sin()


class HarmlessCounter(Counter):
    def forward(self, x):
        self.calls += 1
        return x


class Factor(Counter):
    """Beside the counter, a factor that no operator has as it is."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, x):
        self.calls += 1
        self.factor *= 1.1
        return x * (self.factor + 1)


class PlainFactor(Factor):
    def forward(self, x):
        self.calls += 1
        self.factor *= 1.1
        return x * self.factor


class Reseeded(Counter):
    def forward(self, x):
        self.calls += 1
        torch.manual_seed(time.time_ns())
        return x + torch.rand_like(x)


class Warns(nn.Module):
    def forward(self, x):
        warnings.warn("in a pass", stacklevel=2)
        return x


class Momentum(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x):
        self.momentum *= 0.9
        return super().forward(x)


class MovingAverage(nn.Module):
    def __init__(self):
        super().__init__()
        self.average = torch.zeros(WIDTH)

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x * (1 + self.average)


class Buffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        self.average.lerp_(x.detach().mean(0), 0.1)
        return x * (1 + self.average)


class Threads(nn.Module):
    def forward(self, x):
        torch.set_num_threads(2)
        return x


class DrawnInBuild(nn.Module):
    """With `build_without_seed`."""

    def __init__(self):
        super().__init__()
        self.noise = torch.rand(WIDTH)

    def forward(self, x):
        return x + self.noise


class DrawnAtImport(nn.Module):
    def forward(self, x):
        return x * DRAWN_AT_IMPORT


class Time(nn.Module):
    def forward(self, x):
        return x * float(np.random.default_rng().normal())


class Thread(nn.Module):
    """Another thread draws from the global generator, how often nobody knows."""

    def forward(self, x):
        size = 1 + int.from_bytes(os.urandom(2), "little")
        thread = threading.Thread(target=torch.rand, args=(size,))
        thread.start()
        thread.join()
        return x + torch.rand_like(x)


class ShyNoise(nn.Module):
    """Noise that is not there while operators are watched."""

    def forward(self, x):
        return x if _get_current_dispatch_mode() else x * float(np.random.default_rng().normal())


@torch.library.custom_op("planted::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Stand in for a kernel that adds in any order."""
    return x * float(np.random.default_rng().normal(1, 0.1))


noisy.register_autograd(lambda context, gradient: gradient)


class Kernel(nn.Module):
    def forward(self, x):
        return noisy(x)


class _NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return noisy(gradient)


class KernelInBackward(nn.Module):
    def forward(self, x):
        return _NoisyGradient.apply(x)


class FailsOnWorker1(nn.Module):
    def forward(self, x):
        if os.environ.get("RANK") == "1":
            raise ZeroDivisionError("planted")
        return x


class TwoWords(Exception):
    """An error that pickle writes and cannot read."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


class FailsInOwnWords(nn.Module):
    def forward(self, x):
        if os.environ.get("RANK") == "1":
            raise TwoWords("planted", "here")
        return x


class DiesOnWorker1(nn.Module):
    def forward(self, x):
        if os.environ.get("RANK") == "1":
            os._exit(3)
        return x


class Langevin(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class PythonLangevin(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["params"][0].mul_(1 + 1e-3 * random.random())


class NumpyLangevin(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["params"][0].add_(torch.tensor(np.random.normal()))


def loss_of(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def network(kind):
    return nn.Sequential(
        nn.Linear(5, WIDTH),
        kind(),
        nn.BatchNorm1d(WIDTH),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(WIDTH, 4),
    )


def build_without_seed(kind):
    return network(kind), loss_of


def build(kind):
    torch.manual_seed(0)
    return build_without_seed(kind)


def with_fault(kind):
    return partial(build, kind)


def batch(rows=20):
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, 5, generator=generator),
        "y": torch.randint(0, 4, (rows,), generator=generator),
    }
