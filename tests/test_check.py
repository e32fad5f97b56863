import doctest
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samestep
from samestep.batches.batch import LocalBatch
from samestep.checking.examination import Examination, Plan
from samestep.checking.result import CheckResult
from samestep.errors import BatchError, ConfigError, NonFiniteError

from . import planted
from .cases import mostly_long
from .planted import with_fault


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def check(build, batch=None, towers=4, **options):
    """Check with two workers, in this process."""
    options = {"workers": (2,), "processes": False, "steps": 2, "device": "cpu", **options}
    return samestep.check(build, planted.batch() if batch is None else batch, towers, **options)


def finding_of(build, **options):
    result = check(build, **{"steps": 1, **options})
    assert not result.same
    return result.finding


STAND_INS = (
    "stand-ins took the workers' places, and share the globals, environment and caches of this process: "
    "check with processes=True as well"
)


# ---- models that keep the promise --------------------------------------------------------------------


def convnet():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(36, 4)]
    return nn.Sequential(*layers), planted.loss_of


def recurrent():
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": nn.LSTM(5, 4, 2, dropout=0.2), "unused": nn.Linear(2, 2)})
    model["tied"] = nn.Linear(4, 4)
    model["again"] = nn.Linear(4, 4)
    model["again"].weight = model["tied"].weight

    def loss_of(model, batch):
        hidden, _ = model["rnn"](batch["x"][:, None])
        return F.cross_entropy(model["again"](model["tied"](hidden[:, 0])), batch["y"])

    return model, loss_of, torch.optim.AdamW(model.parameters())


def spectral():
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 4))), planted.loss_of


@pytest.mark.parametrize(
    ("build", "options"),
    mostly_long(
        [
            (with_fault(planted.Clean), {"statistics": "pooled", "autocast": torch.bfloat16, "seed": 3}),
            (recurrent, {}),
            (spectral, {"buffers": {"0.weight_*": "first"}}),
            (with_fault(planted.Clean), {"towers": 1}),
            (with_fault(planted.Clean), {}),
            (convnet, {"batch": {**planted.batch(), "x": torch.randn(20, 1, 5, 5)}}),
            (with_fault(planted.Clean), {"batch": planted.batch(9), "towers": 3}),
        ],
        4,
    ),
)
def test_a_model_that_keeps_the_promise(build, options):
    result = check(build, **options)
    assert result.same, str(result)
    assert result.notes == ([STAND_INS] if options.get("towers") != 1 else [])


@pytest.mark.long
def test_checking_changes_no_bits_and_no_global_state():
    torch.manual_seed(7)
    threads, expected = torch.get_num_threads(), torch.random.get_rng_state()
    result = check(with_fault(planted.Clean))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), expected)

    torch.set_num_threads(1)
    model, loss_of = planted.build(planted.Clean)
    step = samestep.Step(samestep.Towers(model, 4), loss_of, torch.optim.SGD(model.parameters(), lr=1e-3))
    for _ in range(2):
        step(planted.batch())
    assert result.digest == samestep.digest(model)
    torch.set_num_threads(threads)


def warning_build():
    warnings.warn("in build", stacklevel=2)
    return planted.build(planted.Warns)


def test_each_warning_of_the_program_is_shown_once(recwarn):
    assert check(warning_build).same
    assert sorted(str(warning.message) for warning in recwarn) == ["in a pass", "in build"]


def test_a_loss_that_is_not_finite_is_raised():
    def build():
        model, loss_of = planted.build(planted.Clean)
        return model, lambda model, batch: loss_of(model, batch) * float("nan")

    with pytest.raises(NonFiniteError, match="step 0: the averaged gradient is not finite"):
        check(build)


@pytest.mark.long
def test_the_result_in_words():
    words = "same bits: 4 towers, 2 steps, placements 1, 1, 2 workers"
    assert str(check(with_fault(planted.Clean))) == f"{words}\nnote: {STAND_INS}"
    named = CheckResult(None, (1, 1), 1, 1, "", ["it rained"], "digits")
    assert str(named) == "same bits: digits, 1 tower, 1 step, placements 1, 1 workers\nnote: it rained"


@pytest.mark.long
def test_workers_beyond_the_towers_are_left_out():
    assert check(with_fault(planted.Clean), towers=2, workers=(1, 2, 3)).placements == (1, 1, 2)


@pytest.mark.long
def test_a_list_of_tensors_is_one_batch_and_a_loader_is_many():
    def build():
        torch.manual_seed(0)
        return nn.Linear(5, 4), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])

    x, y = planted.batch().values()
    digests = [
        check(build, batch).digest
        for batch in ([x, y], (x, y), DataLoader(TensorDataset(x, y), 20), iter([(x, y), (x + 1, y)]))
    ]
    assert digests[0] == digests[1] == digests[2] != digests[3]


# ---- planted faults ----------------------------------------------------------------------------------

STREAM = "draw from the global generators"
NO_GENERATOR = "leave out generator=: the global generators are seeded for each step and tower"
PURE = "a tower may depend only on its rows, the weights and the global random generators"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "operator", "cause", "remedy"),
    [
        (planted.OwnDropout, "aten.bernoulli.", "its own (stream of 1 (OwnDropout)), which", NO_GENERATOR),
        (planted.GlobalGenerator, "aten.rand.gen", "its own (GENERATOR of the Python module", NO_GENERATOR),
        (planted.NumpyGenerator, "aten.lift_fresh.", "stream of 1 (NumpyGenerator) is a random", STREAM),
        (planted.PythonGenerator, "aten.mul.", "stream of 1 (PythonGenerator) is a random", STREAM),
        (planted.Counter, "aten.mul.", "calls of 1 (Counter) is kept from tower to tower", PURE),
        (planted.Branch, "aten.", "calls of 1 (Branch) is kept from tower to tower", PURE),
        (planted.MovingAverage, "aten.mul.", "average of 1 (MovingAverage) is a tensor that carries", PURE),
        (planted.Time, "aten.mul.", "its Python numbers differ: ", PURE),
        (planted.Thread, "aten.rand_like.", "random stream has moved", "a generator of its own"),
        (planted.Kernel, "planted.noisy.", "same inputs, different values", "use_deterministic_algorithms"),
        (planted.KernelInBackward, "planted.noisy.", "same inputs, different values", "deterministic kernel"),
    ],
)  # fmt: skip
def test_a_fault_is_named(kind, operator, cause, remedy):
    finding = finding_of(with_fault(kind), towers=5)
    assert finding.module == f"1 ({kind.__name__})"
    assert finding.operator.startswith(operator)
    assert finding.operator.endswith("backward" if kind is planted.KernelInBackward else "forward")
    assert cause in finding.cause
    assert remedy in finding.remedy
    # The first gradient of a backward pass is that of the last layer, unless the fault comes after it. Before
    # a batch norm the gradient of a bias is nothing but rounding errors, which may be the same by chance.
    first = ("0.bias", "0.weight") if kind is planted.KernelInBackward else ("5.bias",)
    assert finding.parameter in first


def test_the_step_and_tower_are_named():
    first_on_the_second_worker = "step 0, tower 3"
    finding = finding_of(with_fault(planted.OwnDropout), towers=5)
    assert (
        finding.what
        == f"not the same bits: one worker and 2 workers differ first in {first_on_the_second_worker}"
    )
    finding = finding_of(with_fault(planted.Kernel), towers=5)
    assert finding.what == "not the same bits: two runs of one worker differ first in step 0, tower 0"
    assert str(finding).splitlines()[1] == "  module     1 (Kernel)"


@pytest.mark.long
def test_a_counter_is_shown_with_its_values():
    assert "it is 2 on one worker and 0 on 2 workers" in finding_of(with_fault(planted.Counter)).cause


@pytest.mark.long
def test_all_values_that_may_be_the_cause_are_named():
    cause = finding_of(with_fault(planted.Factor)).cause
    assert cause == (
        "calls of 1 (Factor) is kept from tower to tower: it is 2 on one worker and 0 on 2 workers (or the "
        "cause is factor of 1 (Factor))"
    )


@pytest.mark.long
def test_only_the_value_that_the_operator_reads_is_named():
    cause = finding_of(with_fault(planted.PlainFactor)).cause
    assert cause.startswith("factor of 1 (PlainFactor) is kept from tower to tower")
    assert "calls" not in cause


def test_a_pass_that_seeds():
    finding = finding_of(with_fault(planted.Reseeded))
    assert finding.module == "1 (Reseeded)"
    assert finding.cause.startswith("the pass itself seeds torch's global generator")
    assert finding.remedy.startswith("leave out torch.manual_seed")


def test_a_momentum_that_passes_change():
    finding = finding_of(with_fault(planted.Momentum))
    assert (finding.module, finding.parameter) == ("1 (Momentum)", "1.running_mean")
    assert finding.cause.startswith("momentum of 1 (Momentum) is kept from tower to tower: it is 0.0")


@pytest.mark.long
def test_a_fault_in_the_loss_function():
    def build():
        torch.manual_seed(0)
        calls = [0]

        def loss_of(model, batch):
            calls[0] += 1
            return F.cross_entropy(model(batch["x"]), batch["y"]) * calls[0]

        return nn.Linear(5, 4), loss_of

    finding = finding_of(build)
    assert finding.module == "the loss function"
    assert "calls of the function around " in finding.cause


def test_numbers_drawn_in_build_that_no_worker_shares():
    finding = finding_of(partial(planted.build_without_seed, planted.DrawnInBuild))
    assert finding.module == "1 (DrawnInBuild)"
    assert "noise of 1 (DrawnInBuild) differs from the start" in finding.cause
    assert "register it as a buffer" in finding.remedy


def test_other_weights_each_time():
    def build():
        model, loss_of = planted.build(planted.Clean)
        nn.init.constant_(model[5].weight, np.random.default_rng().normal())
        return model, loss_of

    finding = finding_of(build)
    assert finding.what.endswith("two runs of one worker differ first in build()")
    assert (finding.parameter, finding.remedy[:20]) == ("5.weight", "seed inside build(),")


@pytest.mark.sampled(50)
@pytest.mark.parametrize(
    ("kind", "operator", "generator"),
    [
        (planted.Langevin, "aten.randn_like.default", "generator,"),
        (planted.PythonLangevin, "aten.mul_.Tensor", "generator of random,"),
        (planted.NumpyLangevin, "aten.lift_fresh.default", "generator of np.random,"),
    ],
)
def test_an_update_that_draws(kind, operator, generator):
    def build():
        model, loss_of = planted.build(planted.Clean)
        return model, loss_of, kind(model.parameters(), lr=0.1)

    finding = finding_of(build)
    assert finding.what.endswith("differ first in step 0, update")
    assert (finding.module, finding.operator) == ("the optimizer", f"{operator}, update")
    assert finding.parameter == "0.weight"
    assert f"the update draws from this process's global {generator} which" in finding.cause
    assert (
        finding.remedy == "draw in the loss function, or from samestep.streams.generator(seed, purpose, step)"
    )


@pytest.mark.long
def test_a_buffer_that_is_not_averaged():
    finding = finding_of(with_fault(planted.Buffer))
    assert (finding.module, finding.parameter) == ("1 (Buffer)", "average")
    assert finding.what == "cannot train: a buffer that is not averaged changes in step 0, tower 0"
    assert "buffers={'1.average': 'first'}" in finding.remedy
    assert check(with_fault(planted.Buffer), buffers={"1.average": "mean"}).same


def test_a_change_of_threads():
    # Two layers, because kernels of two threads are slow on a machine whose cores are taken.
    finding = finding_of(lambda: (nn.Sequential(nn.Linear(5, 4), planted.Threads()), planted.loss_of))
    assert finding.what == "not the same bits everywhere: step 0, tower 0 changes a setting of its process"
    assert finding.module == "1 (Threads)"
    assert finding.cause.startswith("it sets threads from 1 to 2")
    assert "threads is an option of samestep.init" in finding.remedy


def test_a_difference_that_cannot_be_watched():
    finding = finding_of(with_fault(planted.ShyNoise))
    assert (finding.module, finding.operator, finding.parameter) == (None, None, "5.bias")
    assert finding.cause.startswith("the difference disappeared while every operator was watched")


def test_rows_that_differ():
    def subject(job):
        model = nn.Linear(5, 4)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        towers = samestep.Towers(model, 2, job=job)
        step = samestep.Step(towers, planted.loss_of, torch.optim.SGD(model.parameters(), lr=0.1))
        return step, iter(
            [{**planted.batch(), "x": torch.from_numpy(np.random.default_rng().normal(size=(20, 5))).float()}]
        )

    finding = Examination(subject, Plan(1, (), processes=False, device="cpu", threads=1)).run()
    assert finding.cause == "the rows that the tower is given are not the same"


def test_what_has_no_effect_yet_is_noted():
    result = check(with_fault(planted.HarmlessCounter))
    assert result.same
    assert result.notes == [
        STAND_INS,
        "calls of 1 (HarmlessCounter) is not the same in all placements, but had no effect on these steps",
    ]


@pytest.mark.long
def test_what_cannot_be_sent_to_a_process_is_checked_here():
    result = check(lambda: planted.build(planted.Clean), processes=True)
    assert result.same
    (note,) = result.notes
    assert note.startswith("stand-ins took the workers' places")
    assert "lambda" in note
    assert not check(lambda: planted.build(planted.Counter), processes=True).same


def test_a_counter_of_the_class():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            type(self).calls += 1
            return super().forward(x) * self.calls

    finding = finding_of(lambda: (nn.Sequential(Counting(5, 4)), planted.loss_of))
    assert finding.cause.startswith(
        "calls of the class test_a_counter_of_the_class.<locals>.Counting is kept from tower to tower"
    )


@pytest.mark.long
def test_the_page_on_checks_is_true():
    page = Path(__file__).parents[1] / "docs" / "check.md"
    found = doctest.testfile(str(page), module_relative=False)
    assert found.attempted > 20
    assert found.failed == 0


# ---- bad use -----------------------------------------------------------------------------------------

MODEL = nn.Linear(5, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"build": MODEL.weight}, "build is a Parameter: expected a function that makes a model"),
        ({"build": lambda: MODEL}, r"build\(\) returned Linear: expected \(model, loss_fn\)"),
        ({"build": lambda: (MODEL, 3)}, r"build\(\) returned \['Linear', 'int'\]: expected"),
        ({"build": lambda: (MODEL, planted.loss_of)}, r"build\(\) returned the same model again"),
        ({"steps": 0}, "steps = 0: expected an int >= 1"),
        ({"steps": "3"}, "steps = '3': expected an int >= 1"),
        ({"workers": (0,)}, r"workers = \(0,\): expected numbers of workers"),
        ({"workers": 2}, r"workers = 2: expected numbers of workers"),
        ({"workers": "2"}, r"workers = '2': expected numbers of workers"),
        ({"workers": ("2",)}, r"workers = \('2',\): expected numbers of workers"),
        ({"workers": (2.5,)}, r"workers = \(2.5,\): expected numbers of workers"),
        ({"processes": "no"}, "processes = 'no': expected True or False"),
        ({"towers": 0}, "towers = 0"),
        ({"batch": iter([])}, "that yields nothing"),
        ({"batch": LocalBatch(1, {})}, "cut for one placement"),
        ({"threads": 0}, "threads = 0"),
    ],
)
def test_bad_use_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check(**{"build": with_fault(planted.Clean), **arguments})


def test_models_of_another_kind_each_time_are_refused():
    widths = iter(range(3, 9))

    def build():
        return nn.Sequential(nn.Linear(5, next(widths)), nn.LazyLinear(4)), planted.loss_of

    with pytest.raises(ConfigError):
        check(build)


def test_a_batch_that_cannot_be_cut():
    with pytest.raises(BatchError, match="rows"):
        check(with_fault(planted.Clean), {"x": torch.zeros(3, 5), "y": torch.zeros(2)})


def test_a_worker_does_not_start_workers(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="check starts its own workers"):
        check(with_fault(planted.Clean))
