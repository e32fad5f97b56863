"""The options of the recipe; torch is not imported, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from samestep.app.bounds import LearningRate, Range
from samestep.app.settings import Settings
from samestep.errors import ConfigError

if TYPE_CHECKING:
    from samestep.app.trainer import Trainer
    from samestep.workers.job import Job

__all__ = ["LmSettings"]

_NUM_BYTES = 256


@dataclass(frozen=True)
class LmSettings(Settings):
    """Train a small GPT on the sources of Python's standard library, or on any tokenizer's files."""

    batch_size: int = 16
    steps: int = 600
    run_dir: Path = Path("runs/lm")
    data_dir: Path | None = None
    """Folder with train.bin and val.bin, flat files of token ids; without it, Python's standard library."""
    token_dtype: Literal["uint8", "uint16", "uint32"] = "uint8"
    """Dtype of the token ids in the files, little-endian."""
    vocabulary: Annotated[int, Range(2, 2**24)] = _NUM_BYTES
    """Number of tokens in the vocabulary; ids start at 0."""
    document_end: Annotated[int, Range(0, 2**24)] | None = None
    """Token that ends each document in the files; without it, a file is one document."""
    context: Annotated[int, Range(1, 2**16)] = 256
    """Length of a row, in tokens."""
    width: Annotated[int, Range(2, 2**14)] = 128
    """Features of a token; a multiple of twice --heads."""
    depth: Annotated[int, Range(1, 1024)] = 4
    """Blocks, each of attention and a perceptron."""
    heads: Annotated[int, Range(1, 2**12)] = 4
    """Attention heads."""
    ngrams: Annotated[int, Range(1, 16)] = 4
    """Length of the longest n-gram that has an embedding, in tokens; 1 for single tokens only."""
    ngram_slots: Annotated[int, Range(1, 2**24)] = 8192
    """Number of embeddings for the n-grams of each length, found by a hash."""
    tied_head: bool = False
    """Share the embedding's weight with the head."""
    learning_rate: LearningRate = 0.004
    """Learning rate after the warm-up; from there it decays to 0 by a cosine schedule."""
    embedding_rate: Annotated[float, Range(0, 10**6, is_open=True)] = 15.0
    """Learning rate of the embeddings, as a multiple of --learning-rate."""
    warmup: Annotated[int, Range(0, 10**12)] = 30
    """Steps over which the learning rate rises from 0."""
    weight_decay: Annotated[float, Range(0, 10**6)] = 0.1
    """Weight decay of AdamW, on matrices only."""
    clip_norm: Annotated[float, Range(0, 10**6, is_open=True)] = 1.0
    """Clip the gradient to this 2-norm."""
    compile: bool = False
    """Compile the model with torch.compile; the last bits of the result differ."""
    shard_optimizer: bool = False
    """Shard the optimizer's state over the workers; losing a worker then ends the run."""
    sample: Annotated[int, Range(0, 10**6)] = 400
    """Bytes of text to sample from the model after each evaluation; only if tokens are bytes."""

    recipe: ClassVar[str] = "lm"
    free: ClassVar[frozenset[str]] = Settings.free | {"data_dir", "sample", "shard_optimizer"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"--width {self.width}: not a multiple of {2 * self.heads}, twice --heads {self.heads}; "
                f"give --width {-(-self.width // (2 * self.heads)) * 2 * self.heads}"
            )
        if self.document_end is not None and self.document_end >= self.vocabulary:
            raise ConfigError(
                f"--document-end {self.document_end}: expected a token below --vocabulary {self.vocabulary}"
            )
        if self.data_dir is None:
            self._check_of_library()

    def build(self, job: Job) -> Trainer:
        """Build the training run."""
        from samestep.recipes.lm.recipe import build

        return build(self, job)

    @property
    def is_of_bytes(self) -> bool:
        """Whether tokens are bytes."""
        return self.token_dtype == "uint8" and self.vocabulary == _NUM_BYTES

    def _check_of_library(self) -> None:
        """Refuse options of token files: the standard library is read as bytes, with known document ends."""
        for name, value in (("token_dtype", "uint8"), ("vocabulary", _NUM_BYTES), ("document_end", None)):
            if getattr(self, name) != value:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{option} {getattr(self, name)}: applies only to token files; leave it out, or pass "
                    "their folder with --data-dir"
                )
