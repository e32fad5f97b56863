"""Passes that use what other tools have made, or objects that refuse to be looked at: the same steps."""

import functools
import types
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import Towers

from .simulation import values

pytestmark = pytest.mark.sampled


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def three_columns(x: torch.Tensor):
    return x[:, :3] * 2


class Refusing:
    """Raises whatever it is asked, but for what it is for."""

    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")

    def __eq__(self, other):
        raise RuntimeError("not comparable")

    __hash__ = None

    def __bool__(self):
        raise RuntimeError("neither")

    def __len__(self):
        raise RuntimeError("without a length")

    def __iter__(self):
        raise RuntimeError("no parts")

    def __repr__(self):
        raise RuntimeError("no words")

    @property
    def size(self):
        raise RuntimeError("no size")

    def __call__(self, x):
        return three_columns(x)


class RefusingClass(type):
    def __getattr__(cls, name):
        raise KeyError(name)


def of_refusing_class():
    class Of(metaclass=RefusingClass):
        def __call__(self, x):
            return three_columns(x)

    return Of()


class Scale:
    factor = 2.0


SCALE = Scale()


def with_proxy():
    proxy = weakref.proxy(SCALE)
    return lambda x: x[:, :3] * proxy.factor


def with_quantized():
    factors = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    return lambda x: x[:, :3] * factors.dequantize()


def with_fake():
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3)
    return lambda x: x[:, : fake.shape[0]]


MAKERS = {
    "a scripted function": lambda: torch.jit.script(three_columns),
    "quantized weights": with_quantized,
    "an object that refuses": Refusing,
    "a scripted net": lambda: torch.jit.script(net()),
    "a traced net": lambda: torch.jit.trace(net(), torch.zeros(2, 6)),
    "a frozen net": lambda: torch.jit.freeze(torch.jit.script(net().eval())),
    "a graph": lambda: torch.fx.symbolic_trace(net()),
    "a parallel net": lambda: nn.DataParallel(net()),
    "a fake tensor": with_fake,
    "a mock": lambda: mock.Mock(side_effect=three_columns),
    "a cached function": lambda: functools.lru_cache(three_columns),
    "a proxy": with_proxy,
    "an object of a class that refuses": of_refusing_class,
    "an exported net": lambda: torch.export.export(
        net(), (torch.zeros(4, 6),), dynamic_shapes=({0: torch.export.Dim("rows")},)
    ).module(),
    "a namespace": lambda: types.SimpleNamespace(use=three_columns).use,
}

IN_FAKE_MODE = {"a fake tensor", "an exported net"}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*torch.ao", "ignore:torch.quantize")
@pytest.mark.parametrize("name", MAKERS)
def test_any_number_of_workers_takes_the_same_steps(name):
    if name in IN_FAKE_MODE and torch.__version__.startswith("2.11."):
        pytest.skip("entering the mode crashes in threads of simulated workers, with these versions")

    def train(job):
        torch.manual_seed(0)
        model, foreign = net(), MAKERS[name]()
        towers = Towers(model, 6, job=job)
        for step in range(3):
            for tower in towers(torch.randn(24, 6, generator=torch.Generator().manual_seed(step))):
                with torch.no_grad():
                    wanted = foreign(tower.batch)
                tower.backward(F.mse_loss(model(tower.batch), wanted))
            towers.average()
            torch.optim.SGD(model.parameters(), 0.1).step()
        return samestep.digest(model)

    assert len({value for num_workers in (1, 2, 3) for value in values(train, num_workers)}) == 1
