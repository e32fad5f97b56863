import runpy
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

import pytest

from samestep import __main__, cli, recipes
from samestep.app.launching import launch
from samestep.errors import ConfigError
from samestep.recipes.digits.recipe import DigitsSettings

from .cases import mostly_long

pytestmark = pytest.mark.sampled(5)


@dataclass(frozen=True)
class Tiny:
    """A recipe for these tests."""

    towers: int = 8
    """Logical slices of the batch."""
    workers: int | Literal["auto"] = "auto"
    """Processes."""
    threads: int = 1
    """CPU threads of each worker."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """What to compute on."""
    batch_size: int = 64
    """Rows of the global batch."""
    rate: float = 0.1
    """Step size."""
    run_dir: Path | None = None
    """Where checkpoints go."""
    fresh: bool = False
    """Start over."""
    nnodes: str | None = None
    """Hosts."""
    rdzv_endpoint: str | None = None
    """Where they meet."""
    rdzv_id: str = "tiny"
    """Which job."""

    def __post_init__(self) -> None:
        if self.towers < 1:
            raise ConfigError(f"towers = {self.towers}: expected at least 1")


@pytest.fixture(autouse=True)
def tiny_recipes(monkeypatch):
    monkeypatch.setattr(recipes, "RECIPES", {"tiny": Tiny, "other": Tiny}, raising=False)
    for name in ("RANK", "WORLD_SIZE", "SAMESTEP_LAUNCHED", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def trained(monkeypatch):
    """Record what is trained instead of training it."""
    settings = []
    monkeypatch.setattr(cli, "_train", lambda chosen, words: settings.append(chosen) or 0)
    return settings


RECIPE = "expected one of tiny, other, or the path of a Python file that ends in .py"
TRAIN_HELP = "see samestep train tiny --help"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "",
            "a command is missing, expected one of train, eval, digest, report, check, doctor; "
            "see samestep --help",
        ),
        (
            "learn",
            "unknown command 'learn', expected one of train, eval, digest, report, check, doctor; "
            "see samestep --help",
        ),
        ("train", f"a recipe is missing, {RECIPE}; see samestep train --help"),
        ("train tin", f"unknown recipe 'tin', {RECIPE}; see samestep train --help"),
        ("check ./mine", f"unknown recipe './mine', {RECIPE}; see samestep check --help"),
        ("train tiny --towers x", f"argument --towers: invalid value 'x', expected an integer; {TRAIN_HELP}"),
        (
            "train tiny --towers=1.5",
            f"argument --towers: invalid value '1.5', expected an integer; {TRAIN_HELP}",
        ),
        ("train tiny --towers", f"argument --towers: expected one argument; {TRAIN_HELP}"),
        ("train tiny --fresh=1", f"argument --fresh: ignored explicit argument '1'; {TRAIN_HELP}"),
        (
            "train tiny --workers x",
            f"argument --workers: invalid value 'x', expected an integer or auto; {TRAIN_HELP}",
        ),
        ("train tiny --rate x", f"argument --rate: invalid value 'x', expected a number; {TRAIN_HELP}"),
        (
            "train tiny --device tpu",
            f"argument --device: invalid value 'tpu', expected one of auto, cpu, cuda; {TRAIN_HELP}",
        ),
        ("train tiny --towrs 4", f"unknown option --towrs, the closest is --towers; {TRAIN_HELP}"),
        ("train tiny --tower 4", f"unknown option --tower, the closest is --towers; {TRAIN_HELP}"),
        (
            "train tiny --batch_size=4",
            f"unknown option --batch_size, the closest is --batch-size; {TRAIN_HELP}",
        ),
        ("train tiny --xyz", f"unknown option --xyz; {TRAIN_HELP}"),
        ("train tiny --fresh 1", f"unexpected '1', expected an option or nothing more; {TRAIN_HELP}"),
        ("train tiny --towers 0", "towers = 0: expected at least 1"),
        ("eval", "the following arguments are required: RUN_DIR; see samestep eval --help"),
        ("eval --towers 3", "unknown option --towers, the closest is --workers; see samestep eval --help"),
        ("digest a b", "unexpected 'b', expected an option or nothing more; see samestep digest --help"),
    ],
)
def test_a_wrong_command_line_is_one_line(line, problem, capsys, trained):
    assert cli.main(line.split()) == 2
    assert capsys.readouterr() == ("", f"samestep: error: {problem}\n")
    assert trained == []


def test_options_become_the_recipes_fields(trained):
    line = "train tiny --towers 4 --workers 2 --batch-size 32 --rate 1e-3 --run-dir runs/a --fresh"
    assert cli.main(line.split()) == 0
    assert trained == [Tiny(4, 2, 1, "cpu", 32, 1e-3, Path("runs/a"), True)]


@dataclass(frozen=True)
class Switches(Tiny):
    """A recipe with defaults that are on, that a function makes, or that are none of both."""

    clip: bool = True
    """Clip gradients."""
    decay: float = field(default_factory=lambda: 0.5)
    """Weight decay."""
    cached: bool | None = None
    """Keep pictures in memory."""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", Switches()),
        ("--no-clip", Switches(clip=False)),
        ("--clip --decay 2", Switches(decay=2.0)),
        ("--cached true", Switches(cached=True)),
        ("--cached false", Switches(cached=False)),
    ],
)
def test_switches_can_be_turned_both_ways(monkeypatch, trained, line, expected):
    monkeypatch.setattr(recipes, "RECIPES", {"switches": Switches})
    assert cli.main(["train", "switches", *line.split()]) == 0
    assert trained == [expected]


def test_the_help_of_switches_says_how(monkeypatch, capsys):
    monkeypatch.setattr(recipes, "RECIPES", {"switches": Switches})
    assert cli.main(["train", "switches", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--clip, --no-clip" in printed
    assert "Clip gradients. (default: on)" in printed
    assert "Weight decay. (default: 0.5)" in printed


def test_a_value_may_be_negative(trained):
    assert cli.main(["train", "tiny", "--rate", "-1"]) == 0
    assert trained == [Tiny(rate=-1.0)]


def test_a_recipe_without_options_has_its_defaults(trained):
    assert cli.main(["train", "tiny"]) == 0
    assert trained == [Tiny()]


def test_one_recipe_still_has_to_be_named(monkeypatch, capsys, trained):
    monkeypatch.setattr(recipes, "RECIPES", {"tiny": Tiny})
    assert cli.main(["train", "tiny"]) == 0
    assert cli.main(["train"]) == 2
    assert "a recipe is missing, expected one of tiny, or the path" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--help", ["train", "eval", "digest", "Print the SHA-256 of the weights"]),
        ("train --help", ["tiny", "other", "A recipe for these tests."]),
        ("train tiny --help", ["--batch-size INT", "Rows of the global batch. (default: 64)"]),
        ("train tiny --help", ["--workers INT|auto", "--device auto|cpu|cuda", "--run-dir PATH", "--fresh "]),
        ("eval -h", ["RUN_DIR", "The run folder that train wrote"]),
    ],
)
def test_help_is_printed(line, words, capsys):
    assert cli.main(line.split()) == 0
    printed = capsys.readouterr()
    assert [word for word in words if word not in printed.out] == []
    assert printed.err == ""


@dataclass(frozen=True)
class Half(Tiny):
    """A recipe for 50% of %(prog)s."""

    rate: float = 0.1
    """At most 100%."""


def test_percent_signs_are_printed_as_they_are(monkeypatch, capsys):
    monkeypatch.setattr(recipes, "RECIPES", {"50%": Half})
    for line, words in (
        (
            "train 50% --help",
            ["usage: samestep train 50% ", "\nA recipe for 50% of %(prog)s.", "At most 100%. "],
        ),
        ("train --help", [" 50% ", "A recipe for 50% of %(prog)s."]),
    ):
        assert cli.main(line.split()) == 0
        printed = capsys.readouterr().out
        assert [word for word in words if word not in printed] == []
        assert "%%" not in printed


def test_the_version_is_that_of_the_package(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"samestep {metadata.version('samestep')}\n"


def test_several_workers_run_the_same_command_line(monkeypatch):
    launched = []
    monkeypatch.setattr(
        launch, "run_command", lambda *args, **options: launched.append((*args, options)) or 5
    )
    words = ["train", "tiny", "--workers", "3", "--threads", "2"]
    assert cli.main(words) == 5
    assert launched == [([sys.executable, "-m", "samestep", *words], 3, {"threads": 2, "nodes": None})]


def test_several_hosts_are_told_what_they_must_have_alike(monkeypatch):
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    monkeypatch.setattr(recipes, "RECIPES", {"digits": DigitsSettings})
    launched = []
    monkeypatch.setattr(launch, "run_command", lambda *args, nodes, **options: launched.append(nodes) or 0)
    words = ["train", "digits", "--workers", "1", "--towers", "3", "--timeout", "9"]
    assert cli.main([*words, "--nnodes", "2:3", "--rdzv-endpoint", "gpu-1", "--rdzv-id", "a"]) == 0
    [nodes] = launched  # with one worker, too
    assert (nodes.fewest, nodes.most, nodes.host, nodes.job_id) == (2, 3, "gpu-1", "a")
    assert (nodes.timeout_s, nodes.most_workers) == (9, 3)
    chosen = {"--towers": "3", "--workers": "given", "--rdzv-endpoint": "given"}
    assert nodes.must_match.items() >= chosen.items()
    assert cli.main([*words, "--nnodes", "2"]) == 2


def test_more_workers_than_towers_start_nothing(monkeypatch, capsys):
    monkeypatch.setattr(launch, "run_command", None)
    assert cli.main(["train", "tiny", "--towers", "2", "--workers", "3"]) == 2
    assert capsys.readouterr().err.startswith("samestep: error: workers = 3: expected 1 <= workers <= towers")


def test_python_m_samestep_is_the_same_command(monkeypatch, capsys):
    monkeypatch.setattr("samestep.workers.interrupts.end_at_once_when_interrupted", lambda: None)
    monkeypatch.setattr(sys, "argv", ["samestep", "learn"])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(Path(cli.__file__).with_name("__main__.py")), run_name="__main__")
    assert leaving.value.code == 2
    assert capsys.readouterr().err.startswith("samestep: error: unknown command 'learn'")


def test_a_folder_that_was_deleted_is_left_in_one_line(tmp_path, monkeypatch, capsys):
    for name in ("samestep.workers.interrupts.end_at_once_when_interrupted", "samestep.cli.main"):
        monkeypatch.setattr(name, lambda: 0)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    assert __main__.main() == 0
    (tmp_path / "folder").rmdir()
    assert __main__.main() == 2
    line = "samestep: error: the current folder was deleted; change to another one (cd)\n"
    assert capsys.readouterr() == ("", line)


# ---- what is imported, in a process of its own -----------------------------------------------------------


def run_python(program, *words):
    """Run a program with the words as its arguments; return its status, stdout, and the lines of stderr."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("line", "status"),
    mostly_long(
        [
            *[("--help", 0), ("train segmentation --help", 0), ("train digits --towers 2 --workers 3", 2)],
            *[("check digits --threads 0", 2), ("eval /nowhere", 2), ("doctor --device tpu", 2)],
            *[("--version", 0), ("", 2), ("learn", 2), ("train", 2), ("train dig", 2), ("doctor --help", 0)],
            *[(f"train {recipe} --help", 0) for recipe in ("digits", "cifar10", "lm")],
            *[("train digits --steps x", 2), ("train segmentation --classes 7", 2)],
        ],
        6,
    ),
)
def test_neither_help_nor_a_wrong_command_waits_for_torch(line, status):
    program = """if True:
        import sys
        from samestep.cli import main
        status = main(sys.argv[1:])
        assert not {"torch", "numpy", "rich", "safetensors"} & sys.modules.keys()
        sys.exit(status)
    """
    found, _, errors = run_python(program, *line.split())
    assert (found, len(errors)) == (status, status // 2), errors


def test_settings_without_a_source_file_have_no_help():
    program = """if True:
        from dataclasses import dataclass
        from samestep.app.command_line import Command, parse

        @dataclass
        class Typed:
            rows: int = 3
            "Not to be found."

        print(parse("prog", Command("", {"typed": Typed}), ["typed", "--rows", "4"]))
    """
    assert run_python(program) == (0, "Typed(rows=4)\n", [])
