"""`samestep.integrations.transformers`: their Trainer takes the step of the whole batch, and nothing else."""

import ast
import copy
import errno
import inspect
import math
import os
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from samestep import (  # noqa: E402
    ConfigError,
    DamagedError,
    DisagreementError,
    MissingFileError,
    NonFiniteError,
    ShardedOptimizer,
    TowerLoader,
    UsageError,
    digest,
)
from samestep.integrations import transformers as integration  # noqa: E402
from samestep.integrations.transformers import NOT_PUBLIC, Trainer  # noqa: E402
from samestep.integrations.transformers.alike import SameWeights, compare_runs  # noqa: E402
from samestep.integrations.transformers.checkpoint import read_state, write_state  # noqa: E402
from samestep.integrations.transformers.evaluation import Prediction, Rounds  # noqa: E402
from samestep.towers.tower import Tower  # noqa: E402
from samestep.towers.towers import Towers  # noqa: E402

from ..simulation import simulate, values  # noqa: E402
from ..small_language import (  # noqa: E402
    NUM_SENTENCES,
    ROWS,
    TOWERS,
    arguments,
    classes,
    classifier,
    collate,
    gpt2,
    llama,
    masked,
    sentences,
    trainer_of,
    true_loss,
)

pytestmark = pytest.mark.packages


class Watch(transformers.TrainerCallback):
    """Keeps, of each step, the model as it was, the gradients that the optimizer got, and the loss."""

    def __init__(self):
        self.models, self.gradients, self.logs = [], [], []

    def on_step_begin(self, args, state, control, model, **_):
        self.models.append(copy.deepcopy(model))

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})

    def on_log(self, args, state, control, logs, **_):
        self.logs.append(logs)


def batches(trainer, rows):
    """The global batches of an epoch, padded as a whole."""
    orders = torch.utils.data.SequentialSampler(rows)
    loader = trainer.create_loader(list(orders), list)
    return [collate([rows[n] for part in batch.slices.values() for n in part]) for batch in loader]


def distance(gradients, model, loss):
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    wrong = sum((gradients[name].double() - each).square().sum() for name, each in expected.items())
    return float((wrong / sum(each.square().sum() for each in expected.values())).sqrt())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("make", "make_rows"),
    [(gpt2, sentences), (classifier, classes), (llama, sentences), (masked, sentences)],
)
def test_each_step_is_that_of_the_whole_batch(make, make_rows, tmp_path):
    rows, watch = make_rows(NUM_SENTENCES), Watch()
    trainer = trainer_of(make(), tmp_path, rows, callbacks=[watch], max_grad_norm=0, learning_rate=1e-2)
    trainer.train()
    assert [len(batch["labels"]) for batch in batches(trainer, rows)] == [21, 21, 5]
    for batch, model, gradients, logs in zip(
        batches(trainer, rows), watch.models, watch.gradients, watch.logs[:3], strict=True
    ):
        model, loss = true_loss(model, batch)
        assert distance(gradients, model, loss) < 2e-6
        assert logs["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)


def test_a_tower_without_labels_adds_nothing_to_the_loss(tmp_path):
    """This model divides by its own number of labels, so that the mean of such a tower is NaN."""
    rows, watch = sentences(TOWERS * ROWS), Watch()
    rows = [{**row, "labels": [-100] * len(row["labels"])} if n % 2 else row for n, row in enumerate(rows)]
    trainer = trainer_of(
        masked(), tmp_path, rows[: TOWERS + 2], callbacks=[watch], per_device_train_batch_size=2
    )
    trainer.train()
    _, loss = true_loss(watch.models[0], collate(rows[: TOWERS + 2]))
    assert watch.logs[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)


def test_what_theirs_makes_of_it(tmp_path):
    """The same batch in 7 accumulation steps: they count first labels, which GPT-2 does not predict."""
    rows, watch = sentences(TOWERS * ROWS), Watch()
    more = {
        "gradient_accumulation_steps": TOWERS,
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 0,
    }
    own = {"kind": lambda *args, towers, **options: transformers.Trainer(*args, **options)}
    trainer_of(gpt2(), tmp_path, rows, callbacks=[watch], **own, **more).train()
    model, loss = true_loss(watch.models[0], collate(rows))
    assert distance(watch.gradients[0], model, loss) > 0.1


def test_a_label_smoother_and_a_loss_function_of_the_user(tmp_path):
    def loss_of(outputs, labels, num_items_in_batch=None):
        # Of as many rows as in their own, where the last label counts nothing: else sums round otherwise.
        labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
        logits = outputs.logits.float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch

    found = {}
    for name, more in {"plain": {}, "own": {"compute_loss_func": loss_of}}.items():
        watch = Watch()
        kind = lambda *args, more=more, **options: Trainer(*args, **options, **more)  # noqa: E731
        torch.manual_seed(0)
        trainer_of(llama(), tmp_path, kind=kind, callbacks=[watch]).train()
        found[name] = [logs["loss"] for logs in watch.logs[:3]]
    assert found["own"] == found["plain"]
    torch.manual_seed(0)
    watch, rows = Watch(), sentences(TOWERS * ROWS)
    trainer = trainer_of(llama(), tmp_path, rows, callbacks=[watch], label_smoothing_factor=0.1)
    trainer.train()
    batch = collate(rows)
    count = batch["labels"][:, 1:].ne(-100).sum()
    whole = trainer.compute_loss(watch.models[0].double(), batch, num_items_in_batch=count)
    assert watch.logs[0]["loss"] == pytest.approx(float(whole.detach()), rel=1e-6)


@pytest.mark.parametrize("make", [gpt2, masked])
def test_the_loss_of_an_evaluation_is_the_mean_over_all_that_counts(make, tmp_path):
    rows = sentences(19)
    trainer = trainer_of(make(), tmp_path, eval_dataset=rows, per_device_eval_batch_size=8)
    _, loss = true_loss(trainer.model, collate(rows))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(loss.detach()), rel=1e-6)


class TestWorkersThatDiffer:
    @pytest.mark.parametrize(
        ("more", "num_rows", "text"),
        [
            ({"label_smoothing_factor": 0.1}, 9, "argument label_smoothing_factor = 0.0.*0.1"),
            ({"eval_steps": 3}, 9, "argument eval_steps"),
            ({}, 8, "rows of train_dataset = 9.*8"),
        ],
    )
    def test_in_what_they_train_with_are_told(self, more, num_rows, text, tmp_path):
        def work(job):
            own, rows = (more, num_rows) if job.rank else ({}, 9)
            args = arguments(tmp_path / str(job.rank), dataloader_num_workers=job.rank, **own)
            compare_runs(job, args, range(rows))

        for outcome in simulate(work, 2):
            with pytest.raises(DisagreementError, match=text):
                raise outcome.error

    @pytest.mark.parametrize("name", ["weight", "running_mean"])
    def test_in_the_weights_that_they_end_with_are_told(self, name):
        def work(job, rank_that_writes, policies=dict):
            model = torch.nn.BatchNorm1d(1)
            with torch.no_grad():
                model.register_buffer("cache", torch.full((1,), job.rank), persistent=False)
                model.register_buffer("own", torch.zeros(1))
                model.state_dict()[name].fill_(float(job.rank == rank_that_writes))
                model.own.fill_(job.rank if policies() else 0)
            SameWeights(job, policies).on_train_end(None, None, None, model=model)

        assert values(lambda job: work(job, None), 2) == [None, None]
        assert values(lambda job: work(job, None, lambda: {"own": "ignore"}), 2) == [None, None]
        text = f"the end of training: .*hash of the weights in {name} = .*; expected the same weights: "
        for outcome in simulate(lambda job: work(job, 1), 2):
            with pytest.raises(DisagreementError, match=text):
                raise outcome.error


class TestAnEvaluation:
    """Seven batches of numbers; a prediction's loss is drawn, as masks and sampled texts are."""

    @staticmethod
    def evaluate(job, read=lambda job, n: torch.rand(3), predict=lambda job: torch.rand(()), weight=1.0):
        loader = (read(job, n) for n in range(7))
        model = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(model.weight, weight)
        torch.nn.init.zeros_(model.bias)
        rounds, found = Rounds(loader, model, job, seed=0), []
        torch.manual_seed(job.rank)
        with rounds.together():
            for batch in rounds:
                prediction = rounds.predict(batch, lambda _: Prediction(predict(job), 3, None, None))
                found.append((batch.tolist(), float(prediction.loss)))
        metrics = {"eval_of": job.rank}
        rounds.end(metrics)
        return found, rounds.loss(), metrics

    @pytest.mark.parametrize("num_workers", [2, 3, 8])
    def test_what_is_drawn_does_not_depend_on_the_number_of_workers(self, num_workers):
        (alone,) = values(self.evaluate, 1)
        assert len({loss for _, loss in alone[0]}) == 7
        assert values(self.evaluate, num_workers) == [alone] * num_workers

    @pytest.mark.parametrize(
        ("what", "text"),
        [
            ("read", r"checksum of batch 4 = "),
            ("weight", r"worker 0 has hash of the weights in weight = "),
        ],
    )
    def test_other_data_or_weights_on_one_worker_are_told_on_all(self, what, text):
        def work(job):
            read = lambda job, n: torch.full((3,), float(job.rank * (n > 3)))  # noqa: E731
            return self.evaluate(job, **{what: {"read": read, "weight": float(job.rank)}[what]})

        for outcome in simulate(work, 2):
            with pytest.raises(DisagreementError, match=text):
                raise outcome.error

    def test_an_error_of_one_worker_ends_all(self):
        def broken(job):
            if job.rank == 1:
                raise ValueError("a loss broke")
            return torch.zeros(())

        first, second = simulate(lambda job: self.evaluate(job, predict=broken), 2)
        assert isinstance(second.error, ValueError)
        with pytest.raises(DisagreementError, match="evaluation: worker 1 failed: ValueError: a loss broke"):
            raise first.error


def test_a_run_that_is_resumed_ends_in_the_same_weights(tmp_path):
    def model():
        torch.manual_seed(0)
        return gpt2(dropout=0.1)

    saving = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1}
    whole = trainer_of(model(), tmp_path, **saving)
    whole.train()
    for step in (2, 3):  # within an epoch, and after one
        resumed = trainer_of(model(), tmp_path / "resumed", **saving)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert digest(resumed.model) == digest(whole.model)
    state = tmp_path / "checkpoint-2" / "samestep.json"
    other = trainer_of(model(), tmp_path / "other", **saving | {"per_device_train_batch_size": 4})
    with pytest.raises(ConfigError, match="batch_size"):
        other.train(resume_from_checkpoint=str(state.parent))
    state.write_text(state.read_text()[:-1])
    with pytest.raises(DamagedError, match=r"samestep.json is damaged"):
        resumed.train(resume_from_checkpoint=str(state.parent))
    state.unlink()
    with pytest.raises(MissingFileError, match=r"samestep.json does not exist"):
        resumed.train(resume_from_checkpoint=str(state.parent))


def state_of_towers():
    towers = Towers(torch.nn.Linear(1, 1), 2)
    return towers, TowerLoader([1.0, 2.0], 2, towers)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "3",
        "{",
        '{"towers": 1}',
        '{"towers": {"towers": 2, "seed": 0, "step": "x"}}',
        "[" * 100_000,
    ],
)
def test_a_state_that_is_not_one_is_named(tmp_path, text):
    (tmp_path / "samestep.json").write_text(text)
    with pytest.raises(
        DamagedError, match=rf"^{tmp_path}/samestep.json is damaged \(.*\): go on from an older"
    ):
        read_state(str(tmp_path), *state_of_towers())


def test_a_state_of_other_towers_is_named(tmp_path):
    write_state(str(tmp_path), *state_of_towers())
    towers = Towers(torch.nn.Linear(1, 1), 3)
    with pytest.raises(
        ConfigError, match=rf"^{tmp_path}/samestep.json: the state of towers .* towers = 2, not 3"
    ):
        read_state(str(tmp_path), towers, TowerLoader([1.0, 2.0], 2, towers))


def test_a_full_disk_leaves_the_state_that_was_there(tmp_path, monkeypatch):
    towers, loader = state_of_towers()
    write_state(str(tmp_path), towers, loader)
    before = (tmp_path / "samestep.json").read_text()

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    loader.position = 1
    with pytest.raises(OSError, match=r"samestep.json: cannot be written \(No space left on device\)"):
        write_state(str(tmp_path), towers, loader)
    assert (tmp_path / "samestep.json").read_text() == before


def test_gradient_checkpointing_changes_no_bit(tmp_path):
    found = set()
    for more in ({}, {"activation_checkpointing": True}):
        torch.manual_seed(0)
        trainer = trainer_of(gpt2(dropout=0.1), tmp_path, **more)
        trainer.train()
        found.add(digest(trainer.model))
    assert len(found) == 1


def test_a_gradient_that_is_not_finite_is_traced(tmp_path):
    class Broken(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return loss * (math.nan if 9 in inputs["input_ids"][:, 0] else 1)

    with pytest.raises(NonFiniteError, match=r"tower \d, rows \d+ to \d+, loss nan"):
        trainer_of(llama(), tmp_path, kind=Broken).train()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"gradient_accumulation_steps": 4}, r"gradient_accumulation_steps = 4.*towers=28"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size = True"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen"),
        ({"torch_empty_cache_steps": 5}, "torch_empty_cache_steps"),
        ({"torch_compile": True}, "torch_compile = True"),
        ({"dataloader_in_order": False}, "dataloader_in_order = False"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint = True"),
        ({"optim": "lomo"}, "optim = "),
        ({"batch_eval_metrics": True}, "batch_eval_metrics"),
        ({"ignore_data_skip": True}, "ignore_data_skip = True"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches = True"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
            "gradient_accumulation_kwargs = .*num_steps of 1",
        ),
    ],
)
def test_what_has_no_meaning_with_towers_is_refused(more, text, tmp_path):
    with pytest.raises(ConfigError, match=text):
        trainer_of(gpt2(), tmp_path, **more)


def test_overriding_what_is_not_called_is_refused(tmp_path):
    class Own(Trainer):
        def get_train_dataloader(self):
            return []

    with pytest.raises(ConfigError, match=r"Own.get_train_dataloader has no effect.*create_loader"):
        trainer_of(gpt2(), tmp_path, kind=Own)


def test_a_loss_that_expects_labels_gets_some(tmp_path):
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            assert (inputs["labels"] != -100).any()
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    for make in (gpt2, masked):
        rows = [{**row, "labels": row["input_ids"]} for row in sentences(TOWERS)]
        trainer = trainer_of(make(), tmp_path, rows, kind=Own)
        trainer.train()
        shifted = sum(len(row["labels"]) - (make is gpt2) for row in rows)
        assert trainer.report.count == shifted


def test_what_prepares_inputs_is_called_for_each_tower(tmp_path):
    class Own(Trainer):
        def _prepare_inputs(self, inputs):
            inputs = super()._prepare_inputs(inputs)
            return {**inputs, "labels": torch.where(inputs["labels"] == 5, -100, inputs["labels"])}

    rows = sentences(TOWERS * ROWS)
    changed = [{**row, "labels": [-100 if n == 5 else n for n in row["labels"]]} for row in rows]
    found = []
    for kind, data in ((Own, rows), (Trainer, changed)):
        torch.manual_seed(0)
        trainer = trainer_of(gpt2(), tmp_path, data, kind=kind)
        trainer.train()
        found.append(digest(trainer.model))
    assert found[0] == found[1]


def test_a_training_step_that_computes_a_loss_itself_is_told_what_to_override(tmp_path):
    class Own(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return self.compute_loss(model, self._prepare_inputs(inputs))

    with pytest.raises(UsageError, match="override compute_loss"):
        trainer_of(gpt2(), tmp_path, kind=Own).train()


def test_a_stream_of_rows_is_refused(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(sentences(9))

    with pytest.raises(ConfigError, match=r"IterableDataset \(Stream\)"):
        trainer_of(gpt2(), tmp_path, Stream(), max_steps=3)


def test_more_workers_than_towers_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="towers"):
        Trainer(gpt2(), towers=0)


class TestWhatIsNotPublic:
    """NOT_PUBLIC is all that is used of theirs, and is there in the version that constraints.txt names."""

    def test_it_is_there(self):
        parameters = {
            "_get_num_items_in_batch": ["self", "batch_samples", "device"],
            "_prepare_inputs": ["self", "inputs"],
            "_save_optimizer_and_scheduler": ["self", "output_dir"],
            "_load_optimizer_and_scheduler": ["self", "checkpoint"],
            "_save_rng_state": ["self", "output_dir"],
            "save_model": ["self", "output_dir", "_internal_call"],
        }
        for name, expected in parameters.items():
            assert list(inspect.signature(getattr(transformers.Trainer, name)).parameters) == expected
        named = {name.partition(".")[2].partition("(")[0] for name in NOT_PUBLIC}
        assert named == {*parameters, "_n_gpu"}

    def test_nothing_else_is_used(self):
        named = {name.partition(".")[2].partition("(")[0] for name in NOT_PUBLIC}
        of_towers = {*vars(Towers(torch.nn.Linear(1, 1), 1)), *vars(Tower(0, None, 1, None))}
        for file in Path(integration.__file__).parent.glob("*.py"):
            tree = ast.parse(file.read_text())
            private = {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[1] != "_"
            }
            methods = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            stored = {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            }
            assert private - named <= methods | stored | of_towers, file
            assert not (private - named) & set(dir(transformers.Trainer)), file


class OfWorker(transformers.TrainingArguments):
    """Arguments of a simulated worker; they share Accelerate's state."""

    should_save = property(lambda self: self.worker == 0)


class Sharding(Trainer):
    def create_optimizer(self, *_):
        self.optimizer = ShardedOptimizer(self.towers, torch.optim.AdamW, lr=0.01)
        return self.optimizer


def test_a_sharded_optimizer_is_saved_by_one_worker_with_all(tmp_path):
    def train(job):
        args = arguments(tmp_path / str(job.world_size), max_steps=2, save_strategy="steps", save_steps=1)
        args.__class__, args.worker = OfWorker, job.rank
        transformers.set_seed(0)
        trainer = Sharding(gpt2(), args, collate, sentences(NUM_SENTENCES), towers=TOWERS, job=job)
        trainer.train()
        return digest(trainer.model)

    assert len({*values(train, 1), *values(train, 2)}) == 1
    saved = [torch.load(tmp_path / f"{n}" / "checkpoint-2" / "optimizer.pt") for n in (1, 2)]
    assert str(saved[0]) == str(saved[1])
