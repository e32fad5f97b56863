"""Every Python block of README and the pages runs, in order; those with `>>>` are doctests."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

from .cases import with_long

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def blocks_of(page):
    return [block for block in _BLOCK.findall(page.read_text()) if not block.startswith(">>>")]


# ---- what a page takes as given ------------------------------------------------------------------------


def pairs():
    inputs = torch.linspace(-1, 1, 96).view(24, 4)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def shard(tower, num_towers, epoch, seed):
    return [*pairs()][tower::num_towers]


def eights():
    inputs = torch.randn(24, 8)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def parts():
    """A model with all that belongs to a run."""
    model = nn.Linear(4, 2)
    towers = samestep.Towers(model, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = samestep.TowerLoader(pairs(), 8, towers)
    return {
        **{"model": model, "towers": towers, "optimizer": optimizer, "loader": loader},
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "averaged_model": torch.optim.swa_utils.AveragedModel(model),
    }


class GPT(nn.Module):
    """As nanoGPT's: (tokens, targets) -> (logits, mean loss)."""

    def __init__(self, vocab_size, block_size):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)

    def forward(self, tokens, targets):
        logits = self.head(self.embed(tokens))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens_file(folder):
    np.arange(5000, dtype=np.uint16).__mod__(256).tofile(folder / "train.bin")
    return folder / "train.bin"


class Pictures(nn.Module):
    """Features of two kinds, as a contrastive loss compares them."""

    def __init__(self):
        super().__init__()
        self.pictures, self.captions = nn.Linear(4, 3), nn.Linear(4, 3)
        self.log_scale = nn.Parameter(torch.zeros(()))


def contrastive():
    model = Pictures()
    towers = samestep.Towers(model, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    return {"model": model, "towers": towers, "optimizer": optimizer, "batch": batch}


def half_precision():
    """An open step of a model in bfloat16, whose average is the next line."""
    model = nn.Linear(4, 2).bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    towers = samestep.Towers(model, 2, accumulate_dtype=torch.float32)
    for tower in towers(torch.randn(8, 4).bfloat16()):
        tower.backward(model(tower.batch).square().mean())
    return {"model": model, "towers": towers}


OPTIONAL = ("webdataset", "datasets", "transformers", "peft", "wandb")
COMMON = {"torch": torch, "nn": nn, "F": F, "np": np, "samestep": samestep}
GIVEN: dict[str, Callable[[Path], Mapping[str, Any]]] = {
    "README": lambda folder: {"dataset": pairs(), "...": nn.Linear(4, 2)},
    "checkpoints": lambda folder: parts(),
    "elastic": lambda folder: {**parts(), "source": shard},
    "nanogpt": lambda folder: {"GPT": GPT, "path": tokens_file(folder)},
    "precision": lambda folder: half_precision(),
    "trainer": lambda folder: {"train": eights(), "test": eights()},
    "whole_batch": lambda folder: contrastive(),
}


WITH_CODE = [name for name, page in PAGES.items() if blocks_of(page)]
LONG = {"trainer", "transformers", "nanogpt"}


@pytest.mark.parametrize("name", with_long(WITH_CODE, LONG))
def test_the_blocks_of_a_page_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["script.py"])
    torch.manual_seed(0)
    # Run as in an interactive session, which has no script to start again: one worker.
    monkeypatch.delattr("__main__.__file__", raising=False)
    given = {**COMMON, **GIVEN.get(name, lambda folder: {})(tmp_path)}
    missing = given.pop("...", None)
    for block in blocks_of(PAGES[name]):
        for package in OPTIONAL:
            if re.search(rf"^(import|from) {package}\b", block, re.M):
                pytest.importorskip(package)
        code = block.replace("model = ...", "model = given_model")
        exec(compile(code, f"{name}.md", "exec"), {**given, "given_model": missing} if missing else given)
    assert "Traceback" not in capsys.readouterr().err


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^::: samestep\.[\w.]*\.(\w+)$", PAGES["api"].read_text(), re.M)
    assert sorted(listed) == sorted(samestep.__all__)


def test_every_test_that_a_page_names_is_there():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    rows = [row for row in PAGES["promises"].read_text().splitlines() if row.startswith("| ")]
    named = {
        name for row in rows for name in re.findall(r"`(\w+)`", row.removesuffix(" |").rpartition(" | ")[2])
    }
    assert len(named) > 40
    assert [
        name for name in sorted(named) if not re.search(rf"def (test_)?{name}\(|class {name}\b", tests)
    ] == []


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r"(\w+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert named == PAGES.keys() - {"README"}
