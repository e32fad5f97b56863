"""Their Trainer with towers, in processes: the same bits and the same figures on any number of workers."""

import re
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("transformers_program.py")
SCENARIOS = Path(__file__).with_name("transformers_scenarios.py")

WORK = (
    "a_step_that_one_worker_lets_be_the_last",
    "an_epoch_that_one_worker_stops",
    "a_checkpoint_that_one_worker_wants",
    "an_evaluation_and_a_log_that_one_worker_wants",
    "training_that_one_worker_stops_after_a_log",
    "early_stopping_on_one_worker",
    "a_sequence_to_sequence_model_that_generates",
)
ERRORS = {
    "weights_that_worker_0_alone_casts_or_merges_at_the_end": (
        r"\[True, .DisagreementError: evaluation: worker 0 has hash of the weights in transformer.wte.*"
        r"change weights and layers on all workers alike.*, True, .DisagreementError: evaluation: .*q_proj"
    ),
    "a_setting_that_is_refused_on_one_worker": "(Disagreement|Config)Error: .*accumulation_steps = 4",
    "an_argument_that_theirs_refuses_on_one_worker": "(Trainer: worker . failed: )?ValueError: .*`eval_d",
    "a_state_that_one_worker_does_not_have": "Error: (resuming: worker . failed: )?.*samestep.json does not",
    "a_loss_that_calls_torch_distributed": "UsageError: .*called torch.distributed",
    "a_callback_that_raises_on_one_worker": "(the end of training by )?KeyError: .a callback broke",
    "a_checkpoint_that_one_worker_does_not_have": "(Towers: worker . failed: )?ValueError: Can't find a",
}


@pytest.fixture
def printed(nursery, tmp_path):
    """Run the program on some workers, or by plain python, and return the lines that worker 0 prints."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")

    def run(num_workers, *words):
        finished = nursery.run([PROGRAM, *words], tmp_path / "output", num_workers)
        assert finished.wait() == [0] * (num_workers or 1), finished.stderr()
        lines = finished.stdout().splitlines()
        return {line.partition(" ")[0]: line for line in lines if not line.startswith("{")}

    return run


@pytest.mark.packages
def test_the_same_runs_on_one_worker_and_on_two(printed, tmp_path):
    alone = printed(None, tmp_path / "alone")
    assert alone.keys() == {"saved", "lora", "bf16"}
    assert printed(2, tmp_path / "two") == alone


@pytest.mark.packages
def test_others_go_on_where_two_workers_were(printed, tmp_path):
    two = printed(2, tmp_path / "two")
    assert printed(3, tmp_path / "three") == two
    for num_workers in (None, 3):
        words = (tmp_path / f"resumed {num_workers}", tmp_path / "two" / "saved" / "checkpoint-3")
        assert printed(num_workers, *words)["saved"] == two["saved"]


@pytest.fixture(scope="module")
def outcomes(nursery, tmp_path_factory):
    """Run all scenarios by plain python, on two workers and on three; return what each worker prints."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    found = {}
    for num_workers in (None, 2, 3):
        folder = tmp_path_factory.mktemp("scenarios")
        finished = nursery.run([SCENARIOS, folder], folder / "output", num_workers)
        assert finished.wait() == [0] * (num_workers or 1), finished.stderr()
        workers = [finished.stdout(number).splitlines() for number in range(num_workers or 1)]
        found[num_workers] = [dict(line.split(" ", 1) for line in lines) for lines in workers]
    return found


@pytest.mark.packages
@pytest.mark.parametrize("name", WORK)
def test_a_program_ends_the_same_on_any_number_of_workers(name, outcomes):
    (alone,) = outcomes[None]
    assert "Error" not in alone[name]
    for num_workers in (2, 3):
        assert [each[name] for each in outcomes[num_workers]] == [alone[name]] * num_workers


@pytest.mark.packages
@pytest.mark.parametrize("name", ERRORS)
def test_what_one_worker_does_otherwise_all_hear_of(name, outcomes):
    for num_workers in (2, 3):
        for each in outcomes[num_workers]:
            assert re.search(ERRORS[name], each[name]), each[name]
