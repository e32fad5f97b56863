"""What programs bring to their Trainer: classes beside it, losses and models of their own, other columns."""

import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from samestep import BatchError, ConfigError, DisagreementError, Towers, digest  # noqa: E402
from samestep.integrations.transformers import Trainer  # noqa: E402
from samestep.integrations.transformers.alike import compare_runs, nets_beside, share_error  # noqa: E402

from ..nets import unseen_count  # noqa: E402
from ..simulation import simulate, values  # noqa: E402
from ..small_language import (  # noqa: E402
    WORDS,
    arguments,
    classes,
    classifier,
    collate,
    gpt2,
    llama,
    masked,
    sentences,
    trainer_of,
)

pytestmark = pytest.mark.packages


class TestTheClassesBesideIt:
    class Theirs(transformers.Trainer):
        def compute_loss(self, *arguments, **options):
            return 2 * super().compute_loss(*arguments, **options)

    def test_a_class_of_a_program_may_come_before_or_after_it(self, tmp_path):
        found = set()
        for bases in ((Trainer, self.Theirs), (self.Theirs, Trainer)):
            torch.manual_seed(0)
            trainer = trainer_of(llama(), tmp_path, sentences(9), kind=type("Own", bases, {}))
            trainer.train()
            found.add((digest(trainer.model), trainer.report.loss))
        torch.manual_seed(0)
        plain = trainer_of(llama(), tmp_path, sentences(9))
        plain.train()
        assert [loss for _, loss in found] == [2 * plain.report.loss]

    def test_one_that_would_not_be_asked_is_refused(self, tmp_path):
        class Theirs(transformers.Trainer):
            def training_step(self, *arguments):
                return super().training_step(*arguments)

        class Own(Trainer, Theirs):
            pass

        with pytest.raises(ConfigError, match=r"Theirs.training_step has no effect.*override compute_loss"):
            trainer_of(gpt2(), tmp_path, kind=Own)

    def test_one_of_transformers_comes_after_it(self):
        with pytest.raises(ConfigError, match=r"expected class Own\(Trainer, Seq2SeqTrainer\)"):

            class Own(transformers.Seq2SeqTrainer, Trainer):
                pass


class TestBuffersThatAForwardChanges:
    """In evaluation mode, too; and the loss of the program puts the model into training mode."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = masked()
            self.norm = torch.nn.BatchNorm1d(WORDS)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, input_ids=None, attention_mask=None, labels=None):
            self.calls += 1
            logits = self.norm(self.net(input_ids, attention_mask).logits.transpose(1, 2))
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    class Training(Trainer):
        def compute_loss(self, model, inputs, **options):
            model.train()
            return super().compute_loss(model, inputs, **options)

    def test_are_put_back_after_labels_were_looked_at_and_after_each_prediction(self, tmp_path):
        trainer = trainer_of(
            self.Net(), tmp_path, sentences(21), kind=self.Training, eval_dataset=sentences(19)
        )
        before = digest(trainer.model)
        trainer.prediction_step(trainer.model, collate(sentences(3)), prediction_loss_only=True)
        assert int(trainer.model.calls) == 1  # that of the prediction
        torch.nn.init.zeros_(trainer.model.calls)
        trainer.model.norm.reset_running_stats()
        assert digest(trainer.model) == before
        losses = [trainer.evaluate()["eval_loss"] for _ in range(2)]
        assert digest(trainer.model) == before
        assert losses[0] == losses[1]
        trainer.train()
        assert int(trainer.model.calls) == int(trainer.model.norm.num_batches_tracked) == 1


def test_labels_under_another_name_are_told_where_they_are_expected(tmp_path):
    rows = [{"input_ids": row["input_ids"]} for row in sentences(9)]
    with pytest.raises(BatchError, match=r"did not return a loss.*the batch has input_ids, .*label_names"):
        trainer_of(gpt2(), tmp_path, rows).train()

    class Broken(Trainer):
        def compute_loss(self, model, inputs, **options):
            raise ValueError("own")

    with pytest.raises(ValueError, match=r"^own$"):
        trainer_of(gpt2(), tmp_path, kind=Broken).train()


class Counting(Trainer):
    """Weighs a loss by how many it has computed, as an annealing does."""

    num_computed = 0

    def compute_loss(self, model, inputs, **options):
        self.num_computed += 1
        return super().compute_loss(model, inputs, **options) * (1 + self.num_computed)


def test_a_number_of_the_programs_class_that_passes_change_gives_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="passes changed num_computed of Counting") as caught:
        trainer_of(gpt2(), tmp_path, sentences(9), kind=Counting).train()
    assert len(caught) == 1


class Keeping(Trainer):
    """Keeps the last loss, for the program to look at."""

    def compute_loss(self, model, inputs, **options):
        self.last = 0.0
        loss = super().compute_loss(model, inputs, **options)
        self.last += loss.item()
        return loss * (1 if self.last > 0 else 2)


def test_one_that_each_pass_sets_anew_gives_none(tmp_path):
    trainer_of(gpt2(), tmp_path, sentences(9), kind=Keeping).train()


class InTurns(Trainer):
    """Weighs the losses of successive passes in turn."""

    count = unseen_count()

    def compute_loss(self, model, inputs, **options):
        return super().compute_loss(model, inputs, **options) * (1 + self.count() % 2)


@pytest.mark.sampled
@pytest.mark.parametrize("make", [gpt2, llama, classifier])
def test_passes_are_compared_although_models_look_at_their_masks(make, tmp_path):
    words = list(range(1, 9))
    rows = [{"input_ids": words, "labels": 1 if make is classifier else words}] * 16
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(make(), tmp_path, rows, kind=InTurns).train()
    told = [str(each.message) for each in caught]
    assert len([each for each in told if "computed in another way than that of tower 0" in each]) == 1


class TestANetBesideTheModel:
    @staticmethod
    def train(job, seeds):
        torch.manual_seed(seeds[job.rank])
        model = llama()
        nets = nets_beside(model, {"model": model, "head": model.lm_head, "teacher": llama(), "n": 1})
        assert nets.keys() == {"teacher"}
        compare_runs(job, arguments("unused"), range(9), nets)

    def test_is_the_same_on_all_workers(self):
        assert values(lambda job: self.train(job, [0, 0]), 2) == [None, None]
        text = r"train: worker 0 has hash of the weights in teacher\.model\.embed_tokens\.weight = "
        for outcome in simulate(lambda job: self.train(job, [0, 1]), 2):
            with pytest.raises(DisagreementError, match=text):
                raise outcome.error


def test_an_error_that_all_workers_meet_leaves_the_job_as_it_was():
    def work(job):
        share_error(KeyError(f"worker {job.rank}"), job)
        job.barrier()

    assert values(work, 3) == [None] * 3


class Learnt(Trainer):
    """Trains a temperature beside the model."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.temperature = torch.nn.Parameter(torch.ones(()))

    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer()
        optimizer.add_param_group({"params": [self.temperature]})
        return optimizer

    def compute_loss(self, model, inputs, **options):
        return self.temperature * super().compute_loss(model, inputs, **options)


class LearntBeside(Learnt):
    """Says so to the towers."""

    def create_towers(self):
        return Towers(self.model, 7, job=self.job, noise_every=0, also=self.temperature)


def test_what_is_trained_beside_the_model_is_averaged_by_towers_that_are_made_for_it(tmp_path):
    with pytest.raises(ConfigError, match=r"pass it as Towers\(model, ..., also=...\)") as raised:
        trainer_of(gpt2(), tmp_path, sentences(9), kind=Learnt).train()
    assert raised.value.__notes__ == ["Override create_towers, which makes the Towers of a Trainer."]
    trainer = trainer_of(gpt2(), tmp_path, sentences(21), kind=LearntBeside, learning_rate=0.1)
    trainer.train()
    assert trainer.temperature.item() < 1


class TestALossThatIsNotAMeanOverWhatIsCounted:
    """Towers would be averaged by other weights than those of the whole batch's loss."""

    class ClassWeights(Trainer):
        weights = torch.tensor([1.0, 2.0, 9.0])

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            return torch.nn.functional.cross_entropy(model(**inputs).logits, labels, weight=self.weights)

    class CountedClassWeights(ClassWeights):
        def count_items(self, inputs):
            return self.weights[inputs["labels"]].sum()

    class MeanOfSentences(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            losses = torch.nn.functional.cross_entropy(
                model(**inputs).logits.transpose(1, 2), labels, reduction="none"
            )
            return (losses.sum(1) / labels.ne(-100).sum(1)).mean()

    class CountedSentences(MeanOfSentences):
        def count_items(self, inputs):
            return None

    @pytest.mark.parametrize(
        ("own", "counted", "make", "make_rows"),
        [
            (ClassWeights, CountedClassWeights, classifier, classes),
            (MeanOfSentences, CountedSentences, masked, sentences),
        ],
    )
    def test_gives_a_warning_until_count_items_says_what_it_is(self, own, counted, make, make_rows, tmp_path):
        with pytest.warns(UserWarning, match="compute_loss gives .*: towers are averaged like that"):
            trainer_of(make(), tmp_path, make_rows(56), kind=own, per_device_train_batch_size=8).train()
        trainer_of(make(), tmp_path, make_rows(56), kind=counted, per_device_train_batch_size=8).train()

    def test_gives_none_where_it_draws_or_takes_no_single_row(self, tmp_path):
        class Drawing(self.ClassWeights):
            def compute_loss(self, *arguments, **options):
                return super().compute_loss(*arguments, **options) * torch.rand(())

        class Whole(self.ClassWeights):
            def compute_loss(self, model, inputs, **options):
                if len(inputs["labels"]) == 1:
                    raise ValueError("one row")
                return super().compute_loss(model, inputs, **options)

        for kind in (Drawing, Whole):
            rows = classes(56)
            trainer_of(classifier(), tmp_path, rows, kind=kind, per_device_train_batch_size=8).train()
