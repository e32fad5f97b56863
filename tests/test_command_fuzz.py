"""Thousands of wrong command lines, environments, settings and data folders, each from its seed.

Whatever is given, a command ends with 0, 1 or 2, in seconds, and says in one line what is wrong. Nothing is
trained: a run ends where it would make its towers. To replay a seed, or to run many cases:

    SAMESTEP_FUZZ=12345:1 python -m pytest -s tests/test_command_fuzz.py
"""

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from samestep import cli
from samestep.app import command_line
from samestep.app.launching import launch
from samestep.errors import MissingFileError
from samestep.recipes.cifar10 import data as records, recipe as cifar10
from samestep.recipes.digits import recipe as digits
from samestep.recipes.lm import recipe as lm
from samestep.recipes.segmentation import recipe as segmentation
from samestep.towers.towers import Towers

FIRST, COUNT = map(int, os.environ.get("SAMESTEP_FUZZ", "0:1000").split(":"))
LIMIT_S = 10.0

RECIPES = ("digits", "cifar10", "segmentation", "lm")
NUMBERS = (
    *(
        "0",
        "1",
        "2",
        "3",
        "-1",
        "7",
        "300",
        "2147483648",
        "1000000000000",
        "9" * 30,
        "9" * 5000,
        "1e3",
        "0x10",
    ),
    *(
        "nan",
        "-nan",
        "inf",
        "-inf",
        "1e308",
        "-1e308",
        "1e309",
        "1e-320",
        "0.5",
        "1_0",
        " 5",
        "٣",
        "1.",
        "+2",
    ),
)
TEXTS = (
    "",
    " ",
    "auto",
    "cpu",
    "cuda",
    "bf16",
    "none",
    "pooled",
    "adamw",
    "x",
    "é",
    "\udcff",
    "\x1b[2J",
    "a\nb",
    "%s",
)
PATHS = (
    *(
        "file",
        "fifo",
        "folder",
        "loop",
        "dangling",
        "socket",
        "new",
        "new/er",
        "file/below",
        "fifo/below",
        "run",
    ),
    *("/dev/null", "/dev/full", "/dev/null/x", "/proc", "/proc/self/mem", "/sys/x", "x" * 300, "x/" * 2500),
    *("data", "half", "n\0l", "\ud800", "\x1b[2J", "two\nlines", "~", "-", "--", ".", "run/checkpoints"),
)
OPTIONS = {
    **dict.fromkeys(("towers", "workers", "threads", "batch-size", "steps", "seed", "log-every"), NUMBERS),
    **dict.fromkeys(("summary-every", "checkpoint-every", "keep-checkpoints", "keep-every"), NUMBERS),
    **dict.fromkeys(("checkpoint-minutes", "max-seconds", "timeout", "learning-rate", "power"), NUMBERS),
    **dict.fromkeys(
        ("weight-decay", "classes", "ignore-label", "crop-size", "width", "picture-size"), NUMBERS
    ),
    **dict.fromkeys(("loader-processes",), NUMBERS),
    **dict.fromkeys(("context", "depth", "heads", "vocabulary", "document-end", "warmup", "sample"), NUMBERS),
    **dict.fromkeys(("run-dir", "data-dir", "output"), PATHS),
    **dict.fromkeys(("device", "autocast", "statistics", "optimizer", "weights", "token-dtype"), TEXTS),
    **dict.fromkeys(
        ("tf32", "fresh", "log-device-placement", "follow", "help", "compile", "tied-head", "nonsense"), None
    ),
}
ENVIRONMENT = {
    "COLUMNS": ("0", "1", "-1", "²", "9" * 30, ""),
    "LINES": ("0", "1", "²", ""),
    "TERM": ("dumb", "", "xterm", "\udcff"),
    "FORCE_COLOR": ("1", ""),
    "OMP_NUM_THREADS": ("x", "0"),
    "TORCHELASTIC_MAX_RESTARTS": ("3", "0"),
    "LANG": ("C", "xx_YY.ZZ"),
}
LAUNCHED = {  # by another program than ours, which may be wrong
    "RANK": ("0", "1", "abc", "-1", "", "9" * 30),
    "WORLD_SIZE": ("1", "abc", "0", "-1", "", "1.5"),
    "LOCAL_RANK": ("0", "abc", "-1", ""),
    "MASTER_ADDR": ("127.0.0.1", "", "\udcff"),
    "MASTER_PORT": ("abc", "", "0", "70000", "-1"),
    "TORCHELASTIC_MAX_RESTARTS": ("abc", ""),
}


class Hung(BaseException):
    """A case took longer than it may."""


def choose(chance, likely, unlikely, share=0.15):
    return chance.choice(unlikely) if chance.random() < share else likely


# ---- cases -----------------------------------------------------------------------------------------------


def words_of(chance):
    command = choose(
        chance, chance.choice(["train", "train", "train", "eval", "digest", "report", "check"]), TEXTS, 0.03
    )
    if command in ("eval", "digest", "report"):
        words = [command, choose(chance, "run", PATHS, 0.4)]
    else:
        words = [command, choose(chance, chance.choice(RECIPES), TEXTS, 0.03)]
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        words += option_of(chance)
    if command in ("train", "check"):
        words += ["--device", "cpu"] * (chance.random() < 0.7) + ["--workers", "1"] * (chance.random() < 0.8)
    return words[: chance.randint(0, len(words))] if chance.random() < 0.05 else words


def command_of(chance, folder):
    """Return the words of a command, having made the files that it is about."""
    kind = chance.choice(("words",) * 5 + ("settings",) * 3 + ("pictures", "records"))
    if kind in ("words", "settings"):
        words = words_of(chance) if kind == "words" else [chance.choice(("eval", "digest", "report")), "run"]
        if any(word == "--run-dir" or word in PATHS or "=" in word for word in words):
            fill(folder, chance)
        if kind == "settings" and chance.random() < 0.4:
            return [
                "train",
                "digits",
                "--steps",
                "1",
                "--run-dir",
                "run",
                "--workers",
                "1",
                "--device",
                "cpu",
            ]
        return words + ["--workers", "1", "--device", "cpu"] * (words[:1] == ["eval"])
    recipe, fill_data = {"pictures": ("segmentation", fill_pictures), "records": ("cifar10", fill_records)}[
        kind
    ]
    fill_data(folder / "data", chance)
    return ["train", recipe, "--data-dir", "data", "--workers", "1", "--device", "cpu"]


def option_of(chance):
    name = chance.choice(list(OPTIONS))
    values = OPTIONS[name]
    if values is None:
        return [f"--{name}" + "=1" * (chance.random() < 0.05)]
    value = choose(chance, chance.choice(values), (*NUMBERS, *TEXTS, *PATHS), 0.1)
    return [f"--{name}={value}"] if chance.random() < 0.5 else [f"--{name}", value]


def environment_of(chance):
    found = {}
    for variables, share in ((ENVIRONMENT, 0.1), (LAUNCHED, 0.02)):
        if chance.random() < share:
            for name in chance.sample(list(variables), chance.randint(1, len(variables))):
                found[name] = chance.choice(variables[name])
    return found


def nest(depth):
    return "[" * depth + "]" * depth


def settings_of(chance):
    """Return the bytes of a settings.json that is mostly almost right."""
    values = {"recipe": "digits", "steps": 1, "device": "cpu", "workers": 1, "towers": 2}
    odd = (
        None,
        True,
        0,
        -1,
        2**70,
        10**400,
        1.5,
        1e308,
        "",
        "x" * 5_000_000,
        "\x1b[2J",
        [],
        {},
        [[1]],
        "banana",
    )
    for _ in range(chance.randint(0, 2)):
        name = chance.choice([option.replace("-", "_") for option in OPTIONS] + ["recipe"])
        values[name] = chance.choice((*odd, *RECIPES, "\ud800", "a\0b", {"a": {"b": []}}))
    text = json.dumps(values)
    how = chance.choice(["as it is"] * 6 + ["cut", "nan", "twice", "deep", "digits", "byte", "huge", "list"])
    changed = {
        "cut": text[: chance.randint(0, len(text))],
        "nan": text[:-1] + ', "learning_rate": ' + chance.choice(["NaN", "Infinity", "1e999", "-0"]) + "}",
        "twice": text[:-1] + ', "recipe": "digits"}',
        "deep": text[:-1] + f', "x": {nest(100_000)}}}',
        "digits": text[:-1] + f', "seed": {"9" * 5000}}}',
        "list": f"[{text}]",
    }.get(how, text)
    if how == "byte":
        return text.encode().replace(b"e", b"\xff", 1)
    return (
        text.encode() + b" " * (2**21 * (how == "huge"))
        if how == "huge"
        else changed.encode("utf-8", "replace")
    )


def metrics_of(chance):
    """Return the bytes of a metrics.jsonl, each line mostly with something odd in it."""
    odd = (*(None, True, 0, -1, 2**70, 1.5, 1e308, -1e308, 5e-324, "", "</script>", "\ud800"), [], [[1]], {})
    names = ("step", "time", "event", "loss/total", "step/seconds", "towers/0/loss", "towers/x/loss")
    names += ("workers", "towers", "steps", "name", "reason", "memory_bytes", "accuracy", "</b>\n", "$x$")
    lines = []
    for step in range(chance.randint(0, 9)):
        event = chance.choice(["start", "checkpoint", "end", None, None])
        line = {"step": step, "time": 1e9 + step, "event": event, "loss/total": 1.0, "step/seconds": 1.0}
        line |= {chance.choice(names): chance.choice(odd) for _ in range(chance.randint(0, 3))}
        lines.append(json.dumps({k: v for k, v in line.items() if k != "event" or v is not None}))
    text = "\n".join([*lines, chance.choice(("", '{"step": NaN}', nest(100_000), "9" * 5000, "{"))])
    return text.encode() + chance.choice((b"", b"\xff", b"\0"))


def fill(folder, chance):
    """Make the files that a case may name."""
    (folder / "file").write_text("mine")
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket"))
    (folder / "run").mkdir()
    if chance.random() < 0.9:
        put(folder / "run" / "settings.json", chance, lambda path: path.write_bytes(settings_of(chance)))
    if chance.random() < 0.5:
        put(folder / "run" / "metrics.jsonl", chance, lambda path: path.write_bytes(metrics_of(chance)))


def put(path, chance, write, share=0.05):
    """Write a file, or now and then something that is none, or nothing."""
    if chance.random() >= share:
        return write(path)
    return chance.choice(
        (
            *(os.mkfifo, Path.mkdir, Path.touch, lambda path: path.symlink_to(path.name), lambda path: None),
            lambda path: path.symlink_to("/dev/zero"),
            lambda path: path.symlink_to("/dev/stdin"),
        )
    )(path)


PICTURES = {
    "rgb": lambda: Image.new("RGB", (20, 18), (9, 8, 7)),
    "labels": lambda: Image.new("L", (20, 18), 1),
    "grey": lambda: Image.new("L", (20, 18), 200),
    "palette": lambda: Image.new("P", (20, 18), 1),
    "alpha": lambda: Image.new("RGBA", (20, 18), (1, 2, 3, 4)),
    "16 bits": lambda: Image.fromarray(np.full((18, 20), 1000, np.uint16)),
    "1 bit": lambda: Image.new("1", (20, 18)),
    "small": lambda: Image.new("RGB", (1, 1)),
    "float": lambda: Image.new("F", (20, 18)),
}


def encoded(kind, suffix, chance):
    path = Path(f"picture{suffix}")
    try:
        PICTURES[kind]().save(path)
        content = path.read_bytes()
    except OSError:  # a JPEG has no such pixels
        content = b"\xff\xd8\xff"
    if chance.random() < 0.2:
        place = chance.randrange(len(content))
        return (
            content[:place]
            + chance.choice((b"", b"\0" * 9, bytes([255 - content[place]])))
            + (content[place + 1 :] if chance.random() < 0.7 else b"")
        )
    return content


def fill_pictures(folder, chance):
    """Make a folder for --data-dir of the segmentation, with something wrong in it."""
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for kind in ("pictures", "labels"):
            put(folder / split / kind, chance, Path.mkdir, 0.02)
            if not (folder / split / kind).is_dir():
                continue
            for name in ("a", "b"):
                usual = "rgb" if kind == "pictures" else "labels"
                chosen = choose(chance, usual, list(PICTURES))
                suffix = choose(chance, ".png", (".jpg", ".PNG", ".gif", "", ".png.png"), 0.1)
                content = encoded(chosen, ".jpg" if suffix == ".jpg" else ".png", chance)
                put(
                    folder / split / kind / f"{name}{suffix}",
                    chance,
                    lambda path, c=content: path.write_bytes(c),
                )


def fill_records(folder, chance):
    """Make a folder for --data-dir of cifar10, whose files have two records each here."""
    folder.mkdir()
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        size = choose(chance, 2 * 3073, (0, 1, 3073, 3 * 3073, 2 * 3073 + 1), 0.05)
        content = bytes([choose(chance, 3, (10, 255), 0.02)]) * size
        put(folder / name, chance, lambda path, c=content: path.write_bytes(c), 0.03)


# ---- one case --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stubs():
    """Leave out what costs time and is tested elsewhere: training, starting workers, downloads."""

    def reached(*_, **__):
        raise SystemExit(0)

    def refuse(*_, **__):
        raise MissingFileError("nothing is downloaded here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Towers, "__init__", reached)
        patch.setattr("samestep.workers.job.join", reached)
        for module, net in (
            (digits, "DigitsNet"),
            (cifar10, "Cifar10Net"),
            (segmentation, "SegmentationNet"),
            (lm, "GPT"),
        ):
            patch.setattr(module, net, lambda *_: nn.Linear(1, 1))
        patch.setattr("samestep.app.recipe_check.examine", reached)
        patch.setattr(torch, "manual_seed", lambda _: None)
        patch.setattr(torch, "set_num_threads", lambda _: None)
        patch.setattr(lm, "read_library", cache(lm.read_library))
        patch.setattr(launch, "run_command", lambda *_, **__: 0)
        patch.setattr(records, "fetch", refuse)
        patch.setattr(command_line, "_options", cache(command_line._options))
        patch.setattr(torch, "compile", lambda model, **_: model)
        patch.setattr("samestep.app.lock.WAIT_S", 0.0)
        patch.setattr("samestep.app.reporting.charts._svg", lambda *_: "")
        patch.setattr("samestep.app.evaluate_run._POLL_S", 0.0)
        patch.setattr(records, "_open", lambda path, num_records, real=records._open: real(path, 2))
        yield


@pytest.fixture
def memory():
    """A folder in memory, where there is one: a disk takes more time than all the rest."""
    shared = Path("/dev/shm")
    with TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


@contextmanager
def alarm(seconds):
    def ring(*_):
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_case(seed, capsys, monkeypatch, memory):
    """Run a case; return its words, environment and status, and what stderr got."""
    chance = random.Random(seed)
    folder = memory / str(seed)
    folder.mkdir()
    monkeypatch.chdir(folder)
    words, environment = command_of(chance, folder), environment_of(chance)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        with alarm(LIMIT_S):
            status = cli.main(words)
    except Hung:
        status = "hung"
    except BaseException as error:
        status = f"{type(error).__name__}: {error}"
    finally:
        for name in environment:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(memory)
        shutil.rmtree(folder)
    return words, environment, status, capsys.readouterr().err


def problem_of(status, said):
    """Return what is wrong with how a case ended; None where nothing is."""
    lines = said.split("\n")[:-1]
    errors = [line for line in lines if line.startswith("samestep: error: ")]
    if status not in (0, 1, 2):
        return "status"
    if "Traceback" in said or len(errors) != (status != 0):
        return "stderr"
    if not all(line.isprintable() and len(line) < 6_000 for line in lines):
        return "a line that is long or not printable"
    if len(lines) > len(errors) + 2:
        return "lines"
    return None


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:tf32=True has no effect")
@pytest.mark.parametrize(
    ("first", "count"), [(FIRST, COUNT // 4), (FIRST + COUNT // 4, 2 * COUNT - COUNT // 4)]
)
def test_whatever_is_given_a_command_ends_and_says_why(first, count, stubs, capsys, monkeypatch, memory):
    start_s = time.monotonic()
    statuses, problems = Counter(), []
    for seed in range(first, first + count):
        words, environment, status, said = run_case(seed, capsys, monkeypatch, memory)
        statuses[status] += 1
        if problem := problem_of(status, said):
            cut = [word[:99] for word in words]
            problems.append(
                f"SAMESTEP_FUZZ={seed}:1 {problem}: {cut} {environment} -> {status}, {said[-2000:]}"
            )
    rate = count / (time.monotonic() - start_s)
    print(f"{count} cases from seed {first}, {rate:.0f} a second: {statuses}", file=sys.__stdout__)
    assert not problems, "\n".join([f"{len(problems)} of {count} cases:", *problems[:20]])
    assert count < 250 or min(statuses[status] for status in (0, 2)) > count / 20
