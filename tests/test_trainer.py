"""A trainer for people's own models: what it does, on how many workers ever, and where it is interrupted."""

import json
import random
import shutil
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.app import resume
from samestep.app.launching import script
from samestep.errors import ConfigError, DataError, DisagreementError

from .cases import mostly_long
from .simulation import simulate, values

NUM_TOWERS = 7


def examples():
    torch.manual_seed(1)
    inputs = torch.randn(53, 4)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def accuracy(model, batch):
    assert not model.training
    torch.rand(3)  # from a stream of its own
    logits = model(batch[0])
    loss = F.cross_entropy(logits, batch[1], reduction="sum")
    return {"accuracy": ((logits.argmax(1) == batch[1]).sum(), len(batch[1])), "loss": (loss, len(batch[1]))}


def trainer_of(job, run_dir, rate=0.1, **options):
    """A net with dropout and momentum, 7 towers, batches of 10 of 53 rows: the last one is short."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 2))
    towers = samestep.Towers(model, NUM_TOWERS, job=job, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    step = samestep.Step(towers, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), optimizer)
    loader = samestep.TowerLoader(examples(), 10, towers, seed=3)
    options = {"steps": 15, "log_every": 5, **options}
    options = {"evaluate": samestep.Evaluation(examples(), accuracy, rows=8), **options}
    return samestep.Trainer(step, loader, run_dir=run_dir, **options)


def run(run_dir, num_workers=1, **options):
    """Return the results of all workers, which are the same."""
    results = values(lambda job: trainer_of(job, run_dir, **options).run(), num_workers)
    assert all(result == results[0] for result in results)
    return results[0]


def lines_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


# ---- the same bits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", mostly_long([3, 2], 1))
def test_any_number_of_workers_gets_the_same_weights_and_metrics(tmp_path, whole, num_workers):
    assert run(tmp_path, num_workers, evaluate_every=4) == whole


def test_a_run_goes_on_with_other_workers(tmp_path, whole):
    for steps, num_workers in ((4, 3), (9, 1), (15, 2)):
        result = run(tmp_path, num_workers, steps=steps, checkpoint_every=3)
    assert result == whole


@pytest.mark.long
def test_a_time_limit_ends_it_after_a_checkpoint_and_without_metrics(tmp_path, whole):
    stopped = run(tmp_path, 2, max_seconds=1e-9)
    assert (stopped.step, stopped.metrics, stopped.reason) == (1, {}, "max_seconds")
    assert run(tmp_path, 2) == whole


@pytest.mark.long
def test_what_is_evaluated_meanwhile_changes_nothing(tmp_path, whole):
    result = run(tmp_path, evaluate_every=1)
    assert result == whole
    assert [line["step"] for line in lines_of(tmp_path) if "accuracy" in line] == [*range(1, 16)]


# ---- callbacks -----------------------------------------------------------------------------------------


class Noting(samestep.Callback):
    def __init__(self):
        self.seen = []

    def on_start(self, trainer):
        self.seen.append("start")

    def before_step(self, trainer, batch):
        self.seen.append(f"before {trainer.step.towers.step}")

    def after_step(self, trainer, report):
        self.seen.append(f"after {report.step}")

    def after_evaluation(self, trainer, metrics):
        self.seen.append(f"evaluated {sorted(metrics)}")

    def after_checkpoint(self, trainer, path):
        assert (path / "manifest.json").exists()
        self.seen.append(path.name)

    def on_end(self, trainer):
        self.seen.append("end")


def test_callbacks_are_called_at_their_points(tmp_path):
    noting = Noting()
    trainer_of(
        samestep.Job(torch.device("cpu")), tmp_path, steps=2, evaluate_every=1, callbacks=[noting]
    ).run()
    evaluated = "evaluated ['accuracy', 'loss']"
    assert [seen for seen in noting.seen if not seen.startswith("step-")] == [
        *("start", "before 0", "after 0", evaluated, "before 1", "after 1", evaluated, "end")
    ]
    assert noting.seen[-2:] == ["step-00000002", "end"]


class Patience(samestep.Callback):
    """Halves the learning rate at every second evaluation, and stops at the fifth."""

    def __init__(self):
        self.count = 0

    def after_evaluation(self, trainer, metrics):
        self.count += 1
        if self.count % 2 == 0:
            for group in trainer.step.optimizer.param_groups:
                group["lr"] /= 2
        if self.count == 5:
            trainer.stop()

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [1, 3])
def test_callbacks_have_a_state_and_may_stop_the_run(tmp_path, num_workers):
    def go(run_dir, steps):
        options = {"steps": steps, "evaluate_every": 2, "checkpoint_every": 2}
        results = values(
            lambda job: trainer_of(job, run_dir, callbacks=[Patience()], **options).run(), num_workers
        )
        assert all(result == results[0] for result in results)
        return results[0]

    once = go(tmp_path / "once", 15)
    assert once.step == 11  # the step after that in which it was asked
    assert once.metrics
    go(tmp_path / "parts", 4)
    assert go(tmp_path / "parts", 15) == once


class Names(samestep.Callback):
    """Has a state that no checkpoint can hold."""

    def __init__(self):
        self.steps = []

    def after_step(self, trainer, report):
        self.steps.append(report.step)

    def state_dict(self):
        return {"names": {"a", "b"}}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("num_workers", mostly_long([3, 1], 1))
def test_state_that_cannot_be_saved_is_named_after_the_first_step(tmp_path, num_workers):
    """Not at the first checkpoint, when all steps before it would be lost."""
    names = [Names() for _ in range(num_workers)]
    outcomes = simulate(lambda job: trainer_of(job, tmp_path, callbacks=[names[job.rank]]).run(), num_workers)
    for outcome, callback in zip(outcomes, names, strict=True):
        assert isinstance(outcome.error, ConfigError), outcome.text
        assert "callback Names.names is a set" in outcome.text
        assert len(callback.steps) == 1


class Noise(samestep.Callback):
    """Adds to the weights what it draws from the global generators."""

    def before_step(self, trainer, batch):
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.01 * random.random())


@pytest.mark.long
def test_what_callbacks_draw_goes_on_where_the_run_does(tmp_path):
    def go(run_dir, num_workers, steps, seed):
        def work(job):
            trainer = trainer_of(job, run_dir, steps=steps, callbacks=[Noise()])
            random.seed(seed)
            return trainer.run()

        return values(work, num_workers)[-1]

    once = go(tmp_path / "once", 2, 15, seed=0)
    go(tmp_path / "parts", 3, 4, seed=0)
    go(tmp_path / "parts", 1, 9, seed=1)  # of the script that is run again
    assert go(tmp_path / "parts", 2, 15, seed=2) == once


def test_a_run_that_was_stopped_can_be_run_again(tmp_path):
    trainer = trainer_of(
        samestep.Job(torch.device("cpu")), tmp_path, callbacks=[Patience()], evaluate_every=1
    )
    assert trainer.run().step == 6
    assert trainer.run().step == 15


def test_what_a_callback_raises_ends_the_run_and_its_end_is_called(tmp_path):
    class Raising(Noting):
        def after_step(self, trainer, report):
            raise KeyError("mine")

    raising = Raising()
    with pytest.raises(KeyError, match="mine"):
        run(tmp_path, callbacks=[raising])
    assert raising.seen == ["start", "before 0", "end"]


class Editing(samestep.Callback):
    """Changes the weights, or the optimizer's state, on worker 0 alone: after a step, or an evaluation."""

    def __init__(self, step, what="weights", after="step"):
        self.step, self.what, self.after = step, what, after

    def after_step(self, trainer, report):
        self.edit(trainer, "step")

    def after_evaluation(self, trainer, metrics):
        self.edit(trainer, "evaluation")

    def edit(self, trainer, point):
        if point == self.after and trainer.step.towers.step == self.step and trainer.job.is_first:
            weight = next(trainer.model.parameters())
            momentum = trainer.step.optimizer.state[weight]["momentum_buffer"]
            (momentum if self.what == "momentum" else weight.data).mul_(1.5)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("editing", "place"),
    mostly_long(
        [
            (Editing(14, "momentum"), "step 15, checkpoint"),
            (Editing(15, after="evaluation"), "step 15, the end"),
            (Editing(6), "step 6, checkpoint"),
            (Editing(15), "step 15, checkpoint"),
        ],
        3,
    ),
)
@pytest.mark.parametrize("num_workers", mostly_long([3, 2], 1))
def test_weights_that_came_apart_are_neither_written_nor_the_end(tmp_path, editing, place, num_workers):
    """Before the last checkpoint no step follows that would find it; from another one a run would go on."""

    def work(job):
        trainer_of(job, tmp_path, callbacks=[editing], checkpoint_every=6).run()

    for outcome in simulate(work, num_workers):
        assert isinstance(outcome.error, DisagreementError)
        assert str(outcome.error).startswith(f"{place}: worker 0 has hash of the weights in 0.weight = ")
    written = {path.name for path in (tmp_path / "checkpoints").glob("step-*")}
    assert f"step-{editing.step:08}" not in written or place.endswith("the end")


@pytest.mark.long
def test_a_callback_that_takes_a_step_of_its_own_may_pass_the_last_one(tmp_path):
    class More(samestep.Callback):
        def after_step(self, trainer, report):
            if report.step == 14:
                trainer.step(examples()[:10])

    result = run(tmp_path, callbacks=[More()])
    assert result.step == 16
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000016"]
    assert run(tmp_path, 2) == result


# ---- loggers -------------------------------------------------------------------------------------------


class Kept(samestep.Logger):
    def __init__(self, every=None):
        self.every = every
        self.lines = []

    def log(self, step, scalars):
        self.lines.append((step, scalars))


@pytest.mark.long
def test_loggers_get_scalars_at_their_steps_on_worker_0_alone(tmp_path):
    loggers = []

    def work(job):
        loggers.append(Kept(every=6 if job.is_first else 1))
        trainer_of(job, tmp_path, loggers=[loggers[-1]]).run()

    values(work, 3)
    (kept,) = [logger for logger in loggers if logger.lines]
    assert [step for step, _ in kept.lines] == [6, 12, 15]  # the last one is of the evaluation
    names = kept.lines[0][1].keys()
    assert {"loss/total", "loss/total (smoothed)", "step/learning rate", "towers/0/loss"} <= names
    assert kept.lines[-1][1].keys() == {"accuracy", "loss"}


@pytest.mark.long
def test_a_logger_that_fails_is_left_out_and_the_run_goes_on(tmp_path, whole, capsys):
    class Broken(samestep.Logger):
        def log(self, step, scalars):
            raise OSError(28, "No space left on device")

    assert run(tmp_path, loggers=[Broken()]) == whole
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "samestep: Broken failed (No space left on device); going on without it"


def test_a_term_that_fails_is_left_out(tmp_path, whole, capsys):
    assert run(tmp_path, terms=lambda model: 1 // 0) == whole
    assert capsys.readouterr().err.count("terms failed (ZeroDivisionError") == 1


class NoRate(torch.optim.Optimizer):
    """An optimizer without a learning rate."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1)


def test_an_optimizer_without_a_learning_rate_can_be_logged(tmp_path):
    trainer = trainer_of(samestep.Job(torch.device("cpu")), tmp_path)
    trainer.step.optimizer = NoRate(trainer.model.parameters())
    trainer.run()
    (line,) = [line for line in lines_of(tmp_path) if line["step"] == 5]
    assert "loss/total" in line
    assert "step/learning rate" not in line


def test_nothing_is_printed_of_evaluations_that_are_not_made(tmp_path, capsys):
    run(tmp_path, evaluate=None, evaluate_every=2, steps=4, log_every=100)
    assert not [line for line in capsys.readouterr().out.splitlines() if line.endswith("step 2: ")]


@pytest.mark.long
def test_lines_of_metrics_go_on_where_the_run_does(tmp_path):
    run(tmp_path, steps=10, checkpoint_every=100)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "time": 1, "lost": 1}\n{"step": 1\n[]\n')
    run(tmp_path, 2)
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines if "loss/total" in line] == [5, 10, 15]
    assert [line["workers"] for line in lines if line.get("event") == "start"] == [1, 2]
    assert not any("lost" in line for line in lines)


@pytest.mark.long
def test_a_run_whose_checkpoints_are_gone_does_not_start_over(tmp_path, whole):
    run(tmp_path, 2)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "checkpoints")
    for num_workers in (1, 2):
        with pytest.raises(DataError, match=r"its checkpoints are gone: .*, or fresh=True in a script"):
            run(tmp_path, num_workers)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert run(tmp_path, 2, fresh=True) == whole


def test_metrics_are_never_written_through_a_link(tmp_path, whole, capsys):
    other = tmp_path / "other"
    other.write_text("mine")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").symlink_to(other)
    assert run(run_dir) == whole
    assert other.read_text() == "mine"


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.sampled(50)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.2}, "was trained with optimizer's lr = 0.1, not 0.2"),
        ({"must_match": {"width": 9}}, "was trained with width = 8, not 9"),
    ],
)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_another_experiment_is_refused(tmp_path, num_workers, options, message):
    run(tmp_path, steps=2, must_match={"width": 8})
    for error in values(lambda job: refusal(job, tmp_path, **options), num_workers):
        assert message in error


@pytest.mark.sampled(50)
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("steps", 12, "Trainer: worker 0 has steps = 15, worker 1 has steps = 12"),
        ("evaluate_every", 3, "Trainer: worker 0 has evaluate_every = 0, worker 1 has evaluate_every = 3"),
        ("fresh", True, "Trainer: worker 0 has fresh = False, worker 1 has fresh = True"),
        ("evaluate", None, "Trainer: worker 0 has evaluate = Evaluation, worker 1 has evaluate = None"),
        (
            "must_match",
            {"width": 9},
            "Trainer: worker 0 has must_match width = nothing, worker 1 has must_match width = 9",
        ),
        (
            "rate",
            0.2,
            "worker 0 has must_match optimizer's lr = 0.1, worker 1 has must_match optimizer's lr = 0.2",
        ),
    ],
)
def test_options_that_one_worker_alone_has_are_refused_at_the_start(tmp_path, option, value, message):
    run(tmp_path, steps=2)  # the learning rate of a checkpoint takes the place of the script's

    def work(job):
        trainer_of(job, tmp_path, **({} if job.is_first else {option: value})).run()

    for outcome in simulate(work, 2):
        assert isinstance(outcome.error, DisagreementError)
        assert str(outcome.error).endswith(message)


def refusal(job, run_dir, **options):
    with pytest.raises(ConfigError) as caught:
        trainer_of(job, run_dir, **options).run()
    return str(caught.value)


def test_what_a_forged_checkpoint_says_of_the_run_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as forging:
        forging.setattr(resume, "_must_match", lambda trainer: {"optimizer's lr": torch.zeros(2)})
        run(tmp_path, steps=2)
    (error,) = values(lambda job: refusal(job, tmp_path), 1)
    assert "was trained with optimizer's lr = tensor([0., 0.]), not 0.1" in error


def test_values_that_cannot_be_compared_later_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must_match: sizes = \[1, 2\]: expected a number, text or None"):
        trainer_of(samestep.Job(torch.device("cpu")), tmp_path, must_match={"sizes": [1, 2]})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_seconds", -1),
        ("checkpoint_minutes", float("nan")),
        ("steps", 0),
        ("steps", 1.5),
        ("log_every", 0),
        ("evaluate_every", -1),
        ("keep_checkpoints", True),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path, option, value):
    with pytest.raises(ConfigError, match=f"{option} = {value}: expected"):
        trainer_of(samestep.Job(torch.device("cpu")), tmp_path, **{option: value})


@pytest.mark.parametrize("every", [0, -1, 2.0, True, "10"])
def test_a_logger_s_period_is_a_number_of_steps(tmp_path, every):
    message = f"every = {every!r}: expected an int >= 1, the steps between"
    for make in (samestep.TensorBoard, lambda every: samestep.WandB("mine", every=every)):
        with pytest.raises(ConfigError, match=f"^{message}"):
            make(every=every)
    logger = samestep.Logger()
    logger.every = every
    with pytest.raises(ConfigError, match=f"^Logger.{message}"):
        trainer_of(samestep.Job(torch.device("cpu")), tmp_path, loggers=[logger])


def test_a_loader_without_a_position_is_refused(tmp_path):
    trainer = trainer_of(samestep.Job(torch.device("cpu")), tmp_path)
    with pytest.raises(ConfigError, match="loader is a list: expected a TowerLoader"):
        samestep.Trainer(trainer.step, [1], run_dir=tmp_path, steps=1)


def test_a_loader_without_batches_is_refused(tmp_path):
    trainer = trainer_of(samestep.Job(torch.device("cpu")), tmp_path)

    class Empty(samestep.TowerLoader):
        def __iter__(self):
            return iter(())

    trainer.loader.__class__ = Empty
    with pytest.raises(DataError, match="Empty gave no batch"):
        trainer.run()


# ---- scripts ------------------------------------------------------------------------------------------


def test_a_session_without_a_script_starts_no_workers(monkeypatch, capsys):
    monkeypatch.delattr("__main__.__file__", raising=False)
    samestep.launch(lambda job: print(job.world_size))
    assert capsys.readouterr().out == "1\n"
    with pytest.raises(SystemExit):
        samestep.launch(print, workers=2)
    assert (
        "launch: each worker runs the script again, but this program has no script file"
        in capsys.readouterr().err
    )


def test_a_worker_whose_script_never_comes_to_its_call_fails(monkeypatch, capsys):
    """Else all of them would end well, with nothing done."""
    statuses = []
    monkeypatch.setattr("os._exit", statuses.append)
    monkeypatch.delattr("sys.last_value", raising=False)
    calls = script._Calls("launch(main), call 2")
    script._end_in_vain(calls)
    assert statuses == [1]
    assert "launch(main), call 2: a worker's script ended without this call" in capsys.readouterr().err
    script._end_in_vain(calls)  # once
    assert statuses == [1]


def test_a_process_of_multiprocessing_launches_no_workers(monkeypatch, capsys):
    monkeypatch.setattr("__main__.__file__", "script.py", raising=False)
    monkeypatch.setattr("multiprocessing.parent_process", object)
    with pytest.raises(SystemExit) as ended:
        samestep.launch(print, workers=2)
    assert ended.value.code == 2
    assert "workers run the script again, but this is a multiprocessing process" in capsys.readouterr().err


class Raises(samestep.Callback):
    """Raises at the start or the end of a run, and counts the ends."""

    def __init__(self, where=None):
        self.where, self.num_ends = where, 0

    def on_start(self, trainer):
        if self.where == "start":
            raise KeyError("start")

    def after_step(self, trainer, report):
        if self.where == "step":
            raise KeyError("step")

    def on_end(self, trainer):
        self.num_ends += 1
        if self.where not in (None, "start", "step"):
            raise KeyError(self.where)


class Ends(samestep.Logger):
    ended_with = None

    def log(self, step, scalars):
        pass

    def on_end(self, trainer):
        self.ended_with = trainer.ending


@pytest.mark.parametrize(("where", "num_ends"), [("start", [1, 0, 0]), ("end", [1, 1, 1])])
def test_what_has_started_is_ended_though_a_callback_raises(tmp_path, where, num_ends):
    callbacks, logger = [Raises(), Raises(where), Raises()], Ends()
    with pytest.raises(KeyError, match=where):
        trainer_of(samestep.init(), tmp_path, callbacks=callbacks, loggers=[logger]).run()
    assert [callback.num_ends for callback in callbacks] == num_ends
    assert logger.ended_with == f"KeyError: '{where}'"


@pytest.mark.sampled(50)
@pytest.mark.parametrize(
    ("where", "first", "notes"),
    [
        ([None, "second", "first"], "first", ["second"]),
        (["third", "step", "second"], "step", ["second", "third"]),
    ],
)
def test_the_first_error_is_raised_and_the_later_ones_are_noted(tmp_path, where, first, notes):
    callbacks, logger = [Raises(each) for each in where], Ends()
    with pytest.raises(KeyError) as raised:
        trainer_of(samestep.init(), tmp_path, callbacks=callbacks, loggers=[logger]).run()
    assert raised.value.args == (first,)
    assert raised.value.__notes__ == [f"samestep: Raises.on_end raised KeyError: '{note}'" for note in notes]
    assert [callback.num_ends for callback in callbacks] == [1, 1, 1]
    assert logger.ended_with == f"KeyError: '{first}'"


class Speed(samestep.Logger):
    every = 1

    def __init__(self):
        self.seconds = []

    def log(self, step, scalars):
        self.seconds += [scalars["step/seconds"]] if "step/seconds" in scalars else []


@pytest.mark.long
def test_evaluations_and_checkpoints_are_no_part_of_the_speed(tmp_path):
    def slowly(model, batch):
        time.sleep(0.5)
        return accuracy(model, batch)

    speed, evaluation = Speed(), samestep.Evaluation(examples(), slowly, rows=53)
    options = {"evaluate": evaluation, "evaluate_every": 1, "checkpoint_every": 1}
    trainer_of(samestep.init(), tmp_path, steps=2, loggers=[speed], **options).run()
    assert len(speed.seconds) == 2
    assert max(speed.seconds) < 0.5
