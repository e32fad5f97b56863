"""What a callback asks for on one worker, such as to stop, all workers do in that step."""

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from samestep.integrations.transformers.requests import SharedRequests, may_ask_alone  # noqa: E402

from ..simulation import values  # noqa: E402
from ..small_language import gpt2, sentences, trainer_of  # noqa: E402

pytestmark = pytest.mark.packages

FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Stop(transformers.TrainerCallback):
    """Ends an epoch after its second step."""

    def __init__(self, *steps):
        self.steps, self.positions = steps, []

    def on_step_end(self, args, state, control, **_):
        if state.global_step in self.steps:
            control.should_epoch_stop = True


def after(job, *events, flags=(), rank=1, step=1):
    """Return the flags that a worker has after these events, where worker `rank` alone set some of them."""
    requests = SharedRequests(job)
    requests.is_on = job.world_size > 1
    control = transformers.TrainerControl(**dict.fromkeys(flags, True) if job.rank == rank else {})
    state = transformers.TrainerState(global_step=step)
    for event in events:
        getattr(requests, event)(None, state, control)
    return [name for name in FLAGS if getattr(control, name)]


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_evaluate", "on_save"])
def test_what_one_worker_asks_for_all_do(event, num_workers):
    for flags in ([FLAGS[0]], [FLAGS[1], FLAGS[4]], [*FLAGS]):
        assert (
            values(lambda job, flags=flags: after(job, event, flags=flags), num_workers)
            == [flags] * num_workers
        )
    assert values(lambda job: after(job, event), num_workers) == [[]] * num_workers


def test_a_log_is_shared_where_their_loop_writes_it():
    def work(job, *before):
        if job.rank == 0 and not before:
            return []  # the program's own `trainer.log` on worker 1 alone
        return after(job, *before, "on_log", flags=["should_log", "should_training_stop"])

    assert values(work, 2) == [[], ["should_training_stop", "should_log"]]
    shared = values(lambda job: work(job, "on_step_end"), 2)
    assert shared == [["should_training_stop", "should_log"]] * 2


def test_it_is_the_last_callback(tmp_path):
    trainer = trainer_of(gpt2(), tmp_path, sentences(9))
    late = Stop()
    trainer.add_callback(late)
    trainer.train()
    assert trainer.callback_handler.callbacks[-2] is late
    assert isinstance(trainer.callback_handler.callbacks[-1], SharedRequests)
    trainer.train()
    assert sum(isinstance(each, SharedRequests) for each in trainer.callback_handler.callbacks) == 1


def test_callbacks_of_transformers_cost_no_message(tmp_path):
    callbacks = trainer_of(gpt2(), tmp_path).callback_handler.callbacks
    assert not may_ask_alone(callbacks)
    assert may_ask_alone([*callbacks, Stop()])
    assert may_ask_alone([*callbacks, transformers.EarlyStoppingCallback()])


class TestAnEpochThatIsStopped:
    """Epochs of three batches, each of which is told by the data's position."""

    @staticmethod
    def positions(folder, *steps, checkpoint=None, **more):
        trainer = trainer_of(gpt2(), folder, num_train_epochs=3, callbacks=[Stop(*steps)], **more)
        seen = []
        training_step = trainer.training_step

        def noted(model, inputs, *others):
            seen.append(inputs.position)
            return training_step(model, inputs, *others)

        trainer.training_step = noted
        trainer.train(resume_from_checkpoint=checkpoint)
        return seen

    def test_is_over_in_the_data_too(self, tmp_path):
        assert self.positions(tmp_path) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
        assert self.positions(tmp_path, 1) == [0, 3, 4, 5, 6, 7, 8]
        assert self.positions(tmp_path, 3, 4) == [0, 1, 2, 3, 6, 7, 8]

    def test_is_over_in_a_checkpoint_and_the_resumed_run_warns(self, tmp_path):
        saving = {"save_strategy": "steps", "save_steps": 1}
        self.positions(tmp_path, 1, **saving)
        with pytest.warns(UserWarning, match="the data goes on at batch 3 after 1 steps, as a callback"):
            seen = self.positions(tmp_path / "on", checkpoint=str(tmp_path / "checkpoint-1"))
        assert seen[:3] == [3, 4, 5]
