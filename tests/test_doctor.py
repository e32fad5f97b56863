"""`samestep doctor`, with stand-ins for what takes long."""

import os
import re
import signal
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from samestep import cli
from samestep.app.doctor import found, measure, report, runs
from samestep.app.doctor.found import find
from samestep.app.doctor.measurements import Measurements
from samestep.app.doctor.runs import Fault, Runs
from samestep.app.doctor.trials import Trials
from samestep.errors import ConfigError, StorageError
from samestep.identity import fingerprint

CPU = torch.device("cpu")


# ---- what is found ---------------------------------------------------------------------------------------


@pytest.fixture
def look(monkeypatch, tmp_path):
    """Return what is found, by name."""
    monkeypatch.chdir(tmp_path)

    def look_again():
        return {finding.name: finding for finding in find(CPU)}

    yield look_again
    assert not list(tmp_path.iterdir())


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def test_what_the_bits_depend_on_is_found(look):
    seen = look()
    assert {name: each.text for name, each in seen.items()}.items() >= {
        name: str(value) for name, value in fingerprint(CPU).items()
    }.items()
    assert all(each.holds for each in seen.values())
    assert "gloo" in seen["backends"].text
    assert seen["current folder"].text == "files can be locked"
    assert seen["shared memory"].text.endswith("64 MiB could be reserved")
    assert seen["network"].text.endswith("; 127.0.0.1 answers")


def test_variables_that_matter_are_found_and_no_others(look, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3\x1b[2J")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("MY_API_KEY", "secret")
    seen = look()
    assert "OMP_NUM_THREADS=3\\x1b[2J" in seen["environment"].text
    assert "secret" not in str(seen)
    assert "GLOO_SOCKET_IFNAME = eth7" in seen["network"].text


def test_an_interface_that_gloo_cannot_use_is_found_as_in_a_run(look, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    seen = look()["network"]
    assert "gloo cannot use the network (GLOO_SOCKET_IFNAME = 'eth7'): expected the name of an" in seen.text
    assert not seen.holds
    assert not torch.distributed.is_initialized()


def test_a_temporary_folder_that_cannot_be_used_is_named(look, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert look()["temporary folder"].text.endswith(", because TMPDIR = '/nowhere' cannot be written to")
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
    assert look()["temporary folder"].text.endswith(" free")


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (None, r", but the machine has some: torch \S+ was built for CPUs, install one for CUDA"),
        ("13.0", r", but the machine has some: see CUDA_VISIBLE_DEVICES \('7'\), and `nvidia-smi`"),
    ],
)
def test_gpus_that_torch_does_not_see_are_told_of(look, monkeypatch, tmp_path_factory, version, why):
    folder = tmp_path_factory.mktemp("dev")
    (folder / "nvidia0").touch()
    monkeypatch.setattr(found, "_DEVICES", folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert re.fullmatch(f"none that torch sees{why}", look()["GPUs"].text)


@pytest.mark.parametrize(
    ("where", "error", "said"),
    [
        ((found, "loopback_listener"), ConfigError("127.0.0.1 fails"), "network: 127.0.0.1 fails: FAILED"),
        (
            (os, "posix_fallocate"),
            OSError(28, "disk full"),
            "shared memory: memory cannot be reserved: disk full",
        ),
        (
            (found.tempfile, "TemporaryFile"),
            OSError(30, "read-only"),
            "current folder: cannot be written to (read-only): choose another by --run-dir",
        ),
        ((found.tempfile, "gettempdir"), FileNotFoundError("none"), "temporary folder: none: FAILED"),
        ((os, "getloadavg"), OSError("no load"), "cores: not known: no load"),
    ],
)
def test_what_is_missing_is_named(look, monkeypatch, where, error, said):
    monkeypatch.setattr(*where, raising(error))
    seen = [
        f"{each.name}: {each.text.split('; ')[-1]}{'' if each.holds else ': FAILED'}"
        for each in look().values()
    ]
    assert said in seen


def test_a_folder_without_locks_is_named(look, monkeypatch):
    monkeypatch.setattr(found, "hold", lambda descriptor: None)
    assert look()["current folder"].text.startswith("files cannot be locked: never start two runs")


def test_a_torch_without_gloo_does_not_do(look, monkeypatch):
    monkeypatch.setattr(found.dist, "is_gloo_available", lambda: False)
    assert not look()["backends"].holds


def test_gpus_are_told_apart(look, monkeypatch):
    properties = SimpleNamespace(name="Some GPU", total_memory=80e9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    seen = look()
    assert [seen[f"GPU {n}"].text for n in range(2)] == ["Some GPU, 80.0 GB, capability 9.0"] * 2


# ---- the report ------------------------------------------------------------------------------------------


def failing():
    raise Fault("other weights")


@pytest.fixture
def examine(monkeypatch, capsys):
    """Run the command with these trials and measurements; return its status and what it prints."""

    def run(*words, trials=(), measurements=()):
        monkeypatch.setattr(report, "Trials", lambda *_: trials)
        monkeypatch.setattr(report, "Measurements", lambda *_: measurements)
        status = cli.main(["doctor", "--device", "cpu", *words])
        printed = capsys.readouterr()
        return status, printed.out.splitlines(), printed.err

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return run


def test_all_holds(examine):
    status, lines, errors = examine(trials=[("1 worker", lambda: "some weights")])
    assert (status, lines[0], lines[-1], errors) == (0, "## samestep doctor", "everything holds", "")
    assert "- 1 worker (0.0 s): some weights" in lines


def test_a_trial_that_fails_is_named(examine):
    trials = [("1 worker", failing), ("2 workers", lambda: "the same"), ("3 workers", failing)]
    status, lines, _ = examine(trials=trials)
    assert (status, lines[-1]) == (1, "does not hold: 1 worker; 3 workers")
    assert "- 3 workers (0.0 s): FAILED: other weights" in lines


def test_no_measurement_is_wrong(examine):
    status, lines, _ = examine(measurements=[("a step", failing)])
    assert (status, lines[-1]) == (0, "everything holds")
    assert "- a step (0.0 s): not measured: other weights" in lines


def test_nothing_is_run_that_was_not_asked_for(examine):
    status, lines, _ = examine("--no-run", trials=[("1 worker", failing)])
    assert (status, lines[-1]) == (0, "nothing is missing; nothing was run")


def test_what_is_missing_makes_the_exit_status(examine, monkeypatch):
    monkeypatch.setattr(found, "loopback_listener", raising(ConfigError("down")))
    status, lines, _ = examine("--no-run")
    assert (status, lines[-1]) == (1, "does not hold: network")


def test_it_starts_its_workers_itself(examine, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    status, lines, errors = examine()
    assert (status, lines) == (2, [])
    assert errors == (
        "samestep: error: doctor starts workers by itself: run it as one process, without torchrun\n"
    )


# ---- the trials ------------------------------------------------------------------------------------------


class Canned:
    """Runs of which it is known what they print."""

    def __init__(self, *printed, complained=""):
        self.printed = list(printed)
        self.stderr = complained
        self.words = []
        self.folder = Path

    def start(self, *words):
        self.words.append(words)
        return self

    def finish(self):
        return self.printed.pop(0)

    def reach(self, step):
        pass

    def kill(self):
        pass

    def workers(self):
        return [0]


def told(digit, first_step=1):
    return f"date: step {first_step}, loss = 1\nweights sha256 {digit * 64}\n"


def outcome(work):
    try:
        return work()
    except Fault as fault:
        return f"FAILED: {fault}"


@pytest.fixture
def tried(monkeypatch):
    """Return what comes of all trials of these runs."""

    def try_all(canned, num_devices=0):
        monkeypatch.setattr(os, "kill", lambda *_: None)
        trials = Trials(canned, ["digits"], "cpu", num_devices)
        return [outcome(work) for _, work in trials]

    return try_all


def test_the_same_weights_after_all_that_may_happen(tried):
    canned = Canned(*[told("a")] * 4, told("a", 21), complained="x; going on with 2 workers after step 25\n")
    assert tried(canned) == [
        "weights sha256 aaaaaaaaaaaaaaaa... after 80 steps",
        "the same weights",
        "the same weights",
        "going on with 2 workers after step 25, the same weights",
        "continued with step 21, the same weights",
    ]
    towers = {words[words.index("--towers") + 1] for words in canned.words}
    workers = [words[words.index("--workers") + 1] for words in canned.words]
    assert (towers, workers) == ({7}, [1, 2, 3, 3, 2, 1])


def test_other_weights_a_run_that_ended_and_one_that_began_again(tried):
    said = tried(Canned(told("a"), told("b"), "", told("a"), told("a")))
    other = "FAILED: different weights: sha256 bbbbbbbbbbbbbbbb..., not aaaaaaaaaaaaaaaa..."
    assert said[1:] == [
        other,
        "FAILED: no digest of the weights was printed",
        "FAILED: the other workers did not go on without it",
        "FAILED: the run was not continued from a checkpoint",
    ]


def test_all_gpus_are_tried():
    names = [name for name, _ in Trials(Canned(), ["digits"], "cuda", 9)]
    assert names[:9] == [f"9 towers on {n} worker{'s' * (n > 1)}" for n in range(1, 10)]


def test_measurements_in_words():
    row = '{"towers": 2, "ours_ms": 9.14, "theirs_ms": 8, "low": 1, "ratio": 1.14, "high": 1.3%s}'
    speed = ", ".join([row % "", row % ', "our_syncs": 1, "their_syncs": 0'])
    measurements = Measurements(Canned(f"[{speed}]", '{"8": 24227840, "1": 151437312}'), "cpu", 2)
    assert [work() for _, work in measurements] == [
        "medians\n"
        "  - 2 towers: 9.1 and 8.0 ms, ratio 1.14 (quartiles 1.00, 1.30)\n"
        "  - 2 towers: 9.1 and 8.0 ms, ratio 1.14 (quartiles 1.00, 1.30), the host waits 1 and 0 times",
        "24 MB with 8 towers, 151 MB as one batch",
    ]


def test_waits_for_a_gpu_are_counted_and_other_warnings_are_not(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step(batch):
        for text in ("called a synchronizing CUDA operation", "another one") * 2:
            warnings.warn(text, stacklevel=1)

    assert measure._count_syncs(step, ()) == 2
    assert modes == ["warn", "default"]


@pytest.mark.parametrize("printed", ["", "warning\n"])
def test_a_measurement_without_figures(printed):
    (_, speed), _ = Measurements(Canned(printed), "cpu", 2)
    assert outcome(speed) == f"FAILED: it printed {printed!r} instead of measurements"


# ---- programs --------------------------------------------------------------------------------------------

PARENT = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(": step 3,", flush=True)
time.sleep(60)
"""


def is_there(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Programs whose folder is looked at when they have ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield Runs()
    assert not list(tmp_path.iterdir())


def test_a_program_ends_and_has_printed(started):
    with started:
        assert started.start("-c", "print(2 * 3)").finish() == "6\n"


def test_a_program_that_fails_is_quoted(started):
    program = "import sys; sys.stderr.write('one\\n\\x1b[2Jtwo\\n'); sys.exit(3)"
    with started, pytest.raises(Fault) as fault:
        started.start("-c", program).finish()
    assert str(fault.value) == "exit status 3\n  > one\n  > \\x1b[2Jtwo"


def test_a_program_that_hangs(started, monkeypatch):
    monkeypatch.setattr(runs, "LONGEST_S", 0.2)
    with started, pytest.raises(Fault, match=r"has not ended within 0 s"):
        started.start("-c", "import time; time.sleep(60)").finish()


def test_a_program_that_ends_before_its_step(started):
    with started, pytest.raises(Fault, match=r"has not reported step 3"):
        started.start("-c", "").reach(3)


def test_a_program_that_cannot_be_started(started, monkeypatch):
    monkeypatch.setattr(runs.subprocess, "Popen", raising(OSError("too many processes")))
    with started, pytest.raises(Fault, match="cannot be started: too many processes"):
        started.start("-c", "")


def test_a_killed_program_takes_its_workers_along(started):
    with started:
        run = started.start("-c", PARENT)
        run.reach(3)
        (worker,) = run.workers()
        assert is_there(worker)
        run.kill()
        assert not is_there(worker)


def test_a_signal_leaves_nothing_behind(started):
    before = signal.getsignal(signal.SIGTERM)
    workers = []

    def interrupt():
        with started:
            run = started.start("-c", PARENT)
            run.reach(3)
            workers.extend(run.workers())
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
            time.sleep(10)

    with pytest.raises(SystemExit) as leaving:
        interrupt()
    assert leaving.value.code == 128 + signal.SIGTERM
    assert [is_there(pid) for pid in workers] == [False]
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_folder_for_temporary_files(started, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(StorageError, match="set TMPDIR to another one"), started:
        raise AssertionError("it is there")
    assert signal.getsignal(signal.SIGTERM) is before
