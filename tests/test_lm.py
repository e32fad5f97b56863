"""The language model's recipe: loss, schedule, held-out bits, sample, and runs on any number of workers."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import cli
from samestep.errors import ConfigError, DataError, DisagreementError
from samestep.recipes.lm import recipe
from samestep.recipes.lm.data import IGNORED, Windows
from samestep.recipes.lm.model import GPT, Sizes
from samestep.recipes.lm.recipe import cosine, groups_of, loss_of, nats_of
from samestep.recipes.lm.sample import draw, readable
from samestep.recipes.lm.settings import LmSettings
from samestep.workers.job import Job

from .simulation import simulate, values

JOB = Job(torch.device("cpu"))
TEXT = b"\0" + b"\0".join(b"def f%d(x):\n    return x + %d\n" % (n, n) for n in range(60)) + b"\0"
SMALL = {"context": 16, "width": 16, "depth": 1, "heads": 2, "ngram_slots": 50, "sample": 20}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    texts = {"train": TEXT, "val": TEXT[:500]}
    monkeypatch.setattr(recipe, "read_library", lambda split: np.frombuffer(texts[split], np.uint8))
    return LmSettings(**SMALL, run_dir=tmp_path / "run", device="cpu", towers=7, batch_size=9, steps=4)


def net(**options):
    """Return a net in float64 of which no part is zero, as some are at the start."""
    torch.manual_seed(0)
    model = GPT(Sizes(**{"width": 16, "depth": 1, "heads": 2, "context": 8, "ngram_slots": 50, **options}))
    for weight in model.double().parameters():
        nn.init.normal_(weight, std=0.3)
    return model


# ---- the loss ----------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("num_towers", [1, 4, 5, 9])
def test_the_gradient_is_that_of_the_mean_over_the_tokens_that_count(num_towers):
    model = net()
    windows = Windows(np.frombuffer(TEXT[:35], np.uint8), 8, vocabulary=256, border=0)
    batch = windows.batch(np.arange(5), np.zeros(5, np.uint64))
    inputs, targets, starts = batch
    counts = (targets != IGNORED).nonzero().tolist()
    assert len(counts) == 34  # of 40: the last window is filled up
    logs = model(inputs, starts).log_softmax(-1)
    mean = -sum(logs[n, i, targets[n, i]] for n, i in counts) / len(counts)
    expected = torch.autograd.grad(mean, tuple(model.parameters()))
    towers = samestep.Towers(model, num_towers, job=JOB)
    for tower in towers(batch):
        loss = loss_of(model, tower.batch)
        tower.backward_sum(loss.total, loss.count)
    report = towers.average()
    assert (report.count, report.loss) == (34, pytest.approx(float(mean.detach())))
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-9, atol=1e-12)


def test_held_out_nats_are_those_of_the_tokens_that_count():
    model = net()
    windows = Windows(np.frombuffer(TEXT[:35], np.uint8), 8, vocabulary=256, border=0)
    inputs, targets, starts = windows.batch(np.arange(5), np.zeros(5, np.uint64))
    with torch.no_grad():
        total, count = nats_of(model, (inputs, targets, starts))["nats"]
        logits = model(inputs, starts)
    expected = F.cross_entropy(logits[targets != IGNORED], targets[targets != IGNORED], reduction="sum")
    assert (total.dtype, int(count)) == (torch.float64, 34)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 10), (3, 10), (10, 10), (20, 10)])
def test_the_rate_rises_and_falls_along_a_cosine(warmup, steps):
    rates = [cosine(step, warmup=warmup, steps=steps) for step in range(max(warmup, steps) + 2)]
    assert rates[:warmup] == [(step + 1) / warmup for step in range(warmup)]
    for step in range(warmup, steps):
        share = (step - warmup) / (steps - warmup)
        assert rates[step] == pytest.approx(math.cos(math.pi * share / 2) ** 2)
    assert rates[-1] == pytest.approx(0)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_learn_faster_and_matrices_alone_decay(settings, tied):
    model = net(tied_head=tied)
    embeddings, matrices, rest = groups_of(model, settings)
    named = {parameter: name for name, parameter in model.named_parameters()}
    names = [{named[parameter] for parameter in group["params"]} for group in (embeddings, matrices, rest)]
    tokens = "embedding.tokens.weight"
    assert names[0] == {f"embedding.ngrams.{n}.weight" for n in range(3)} | (set() if tied else {tokens})
    assert names[2] == {name for name in named.values() if "norm" in name}
    assert names[1] == set(named.values()) - names[0] - names[2]
    assert (tokens in names[1]) == tied
    assert embeddings["lr"] == settings.learning_rate * settings.embedding_rate
    decays = [group["weight_decay"] for group in (embeddings, matrices, rest)]
    assert decays == [0, settings.weight_decay, 0]


# ---- text --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_document_is_drawn_with_the_model_s_probabilities():
    model = net(vocabulary=4, context=3).float()
    first = [draw(model, 0, 1, torch.Generator().manual_seed(seed)) for seed in range(500)]
    shares = torch.bincount(torch.tensor([(drawn or [0])[0] for drawn in first]), minlength=4) / 500
    start = torch.zeros(1, 1, dtype=torch.int64)
    expected = model(start, start)[0, 0].softmax(0).detach()
    torch.testing.assert_close(shares, expected, atol=0.08, rtol=0)


def test_a_document_ends_by_itself_or_with_its_length():
    model = net(vocabulary=4, context=3).float()
    drawn = [draw(model, 0, 8, torch.Generator().manual_seed(seed)) for seed in range(50)]
    assert all(0 not in document for document in drawn)
    assert max(map(len, drawn)) == 8
    assert min(map(len, drawn)) < 8
    assert draw(model, 0, 8, torch.Generator().manual_seed(3)) == drawn[3]


def test_no_sample_can_steer_a_terminal():
    assert readable(b"a\x1b[2J\r\tb\n\xc3\xa9\xff\0") == "a\\x1b[2J\\r\tb\n\xe9\\xff\\x00"


# ---- runs --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("options", [{"tied_head": True, "autocast": "bf16", "towers": 5, "ngrams": 1}, {}])
def test_any_number_of_workers_gives_the_same_weights_and_bits(settings, options):
    def run(job):
        is_sharded = job.world_size == 3
        trainer = replace(settings, **options, shard_optimizer=is_sharded).build(job)
        for batch, _ in zip(trainer.loader, range(3), strict=False):
            trainer.step(batch)
        return samestep.digest(trainer.model), tuple(trainer.measure().items())

    assert len({value for num in (1, 2, 3) for value in values(run, num, num)}) == 1


@pytest.mark.long
def test_a_run_that_is_stopped_goes_on_with_the_same_bits(settings, capsys):
    whole = settings.build(JOB).run()
    printed = capsys.readouterr().out
    part = replace(settings, run_dir=settings.run_dir.with_name("part"))
    assert replace(part, max_seconds=1e-9).build(JOB).run().reason == "max_seconds"
    assert len(capsys.readouterr().out) > 0
    assert part.build(JOB).run() == whole
    metrics_sample_and_digest = [
        out[out.index("bits per byte") :] for out in (printed, capsys.readouterr().out)
    ]
    assert len(set(metrics_sample_and_digest)) == 1
    assert set(whole.metrics) == {"bits per byte", "bits per byte of xz -9"}
    assert 6 < whole.metrics["bits per byte"] < 8.1


@pytest.mark.long
def test_it_learns(settings):
    trainer = replace(settings, steps=40, batch_size=16, towers=2, learning_rate=0.02, warmup=5).build(JOB)
    assert trainer.run().metrics["bits per byte"] < 3


def test_workers_with_other_data_are_told():
    def run(job):
        text = TEXT[: 900 + job.rank]
        windows = Windows(np.frombuffer(text, np.uint8), 16, vocabulary=256, border=0)
        recipe.check_same(windows, windows, job)

    for outcome in simulate(run, 2):
        assert isinstance(outcome.error, DisagreementError)
        assert "tokens to train on" in outcome.text


# ---- files of tokens, and wrong settings -------------------------------------------------------------


def test_a_tokenizer_s_files_are_trained_on(tmp_path, capsys):
    tokens = np.random.default_rng(0).integers(0, 1000, 700).astype("<u2")
    for name in ("train", "val"):
        (tmp_path / f"{name}.bin").write_bytes(tokens.tobytes())
    line = "train lm --workers 1 --device cpu --steps 2 --towers 2 --batch-size 4 --context 16 --width 16"
    line += " --depth 1 --heads 2 --ngram-slots 50 --token-dtype uint16 --document-end 7"
    words = [*line.split(), "--data-dir", str(tmp_path), "--run-dir", str(tmp_path / "run")]
    assert cli.main([*words, "--vocabulary", "1000"]) == 0
    *_, metrics, digest = capsys.readouterr().out.splitlines()
    assert re.search(r"bits per token = \d\.\d+$", metrics)
    assert digest.startswith("weights sha256 ")
    short = replace(LmSettings(), data_dir=tmp_path, token_dtype="uint16", vocabulary=900, device="cpu")
    short = replace(short, run_dir=tmp_path / "short", batch_size=2, context=512, width=8, depth=1, heads=1)
    with pytest.raises(DataError, match=r"train\.bin: token \d+ is 9\d\d, expected 0 to 899"):
        short.build(JOB).run()


def test_a_compiler_that_is_not_there_is_named(settings, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(ConfigError, match=r"--compile: no C\+\+ compiler found \(/nowhere/g\+\+\); install"):
        replace(settings, compile=True).build(JOB)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 100}, "--width 100: not a multiple of 8, twice --heads 4; give --width 104"),
        (
            {"vocabulary": 300},
            "--vocabulary 300: applies only to token files; leave it out, or pass their folder with",
        ),
        ({"token_dtype": "uint16"}, "--token-dtype uint16: applies only to token files"),
        ({"document_end": 0}, "--document-end 0: applies only to token files"),
        ({"document_end": 256}, "--document-end 256: expected a token below --vocabulary 256"),
        ({"context": 0}, "--context 0: expected an integer from 1 to 65536"),
        ({"clip_norm": 0.0}, "--clip-norm 0.0: expected a number above 0"),
        ({"ngrams": 0}, "--ngrams 0: expected an integer from 1 to 16"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        LmSettings(**options)
