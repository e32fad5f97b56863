"""What is printed may be lost; the command goes on, says so once, and ends with its own status."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from samestep import cli
from samestep.app.output import lasting_output
from samestep.app.run_folder import all_checkpoints

from .cases import mostly_long

pytestmark = pytest.mark.sampled(5)


class Terminal(io.StringIO):
    """A file that raises what the system said, from the second line on."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        if self.getvalue():
            raise self.error
        return super().write(text)


def full_disk():
    return open("/dev/full", "w")


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def closed_file():
    with Path(os.devnull).open("w") as file:
        return file


def lasting_output_to(monkeypatch, file):
    monkeypatch.setattr(sys, "stdout", file)
    return lasting_output()


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (full_disk, "No space left on device"),
        (broken_pipe, "Broken pipe"),
        (lambda: Terminal(OSError(5, "Input/output error")), "Input/output error"),
        (closed_file, "I/O operation on closed file."),
        (lambda: None, "it is closed"),
    ],
    ids=["full", "pipe", "terminal", "closed", "none"],
)
@pytest.mark.parametrize("printer", [print, lambda text: Console(file=sys.stdout).print(text)])
def test_what_stdout_does_not_take_is_told_once(monkeypatch, file, reason, printer):
    monkeypatch.setattr(sys, "stderr", errors := io.StringIO())
    with lasting_output_to(monkeypatch, file()):
        for number in range(300):
            printer(f"line {number}")
            sys.stdout.flush()
    assert errors.getvalue() == f"samestep: stdout cannot be written to ({reason}); going on without it\n"
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.close()  # what it held has gone to /dev/null


def test_stderr_may_be_lost_too(monkeypatch):
    with open("/dev/full", "w") as full:
        for lost in (full, None):
            monkeypatch.setattr(sys, "stderr", lost)
            with lasting_output_to(monkeypatch, lost):
                print("an error", file=sys.stderr, flush=True)
                print("another", flush=True)
            assert sys.stderr is sys.stdout is lost


def test_what_goes_well_is_unchanged(capsys):
    with lasting_output():
        print("out ×")
        print("err ×", file=sys.stderr)
        assert not sys.stdout.isatty()
        assert sys.stdout.encoding.lower() == "utf-8"
    assert capsys.readouterr() == ("out ×\n", "err ×\n")


@pytest.mark.parametrize(
    ("encoding", "expected"), [("ascii", rb"8\xd78 \udcff"), ("utf-8", b"8\xc3\x978 \\udcff")]
)
def test_characters_that_the_encoding_lacks_are_escaped(monkeypatch, encoding, expected):
    with lasting_output_to(monkeypatch, io.TextIOWrapper(io.BytesIO(), encoding=encoding)):
        print("8×8 \udcff", end="")
    assert sys.stdout.buffer.getvalue() == expected


def test_a_pipe_that_is_full_for_now_is_not_given_up(monkeypatch, capfd):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_blocking(reader, False)
    with open(writer, "w") as file, lasting_output_to(monkeypatch, file):
        for _ in range(100):
            print("x" * 9999, flush=True)
        with open(reader, "rb", buffering=0) as readable:
            while readable.read(1 << 20):
                pass
            print("the end", flush=True)
            received = [readable.read(1 << 20)]
            while received[-1]:  # Python 3.14 keeps what the pipe did not take
                sys.stdout.flush()
                received.append(readable.read(1 << 20))
            assert b"".join(filter(None, received)).endswith(b"the end\n")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "redirection", [">/dev/full", ">&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full", "| true"]
)
@pytest.mark.parametrize(("line", "status"), mostly_long([("--help", 0), ("learn", 2)], 1))
def test_the_exit_status_stands(redirection, line, status):
    program = f"{sys.executable} -m samestep {line} {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == status
    lines = done.stderr.splitlines()
    assert [line for line in lines if not line.startswith("samestep: ")] == []
    assert sum("stdout cannot be written" in line for line in lines) <= 1


def test_a_file_that_is_opened_later_gets_nothing_that_is_printed(tmp_path):
    program = f"""if True:
        import os, sys
        from samestep.app.output import lasting_output
        with lasting_output():
            file = open({str(tmp_path / "weights")!r}, "w")
            os.write(1, b"out")
            os.write(2, b"err")
            assert file.fileno() > 2
    """
    done = subprocess.run(
        ["bash", "-c", '"$@" <&- >&- 2>&-', "-", sys.executable, "-c", program], check=False
    )
    assert done.returncode == 0
    assert (tmp_path / "weights").read_bytes() == b""


@pytest.mark.long
def test_a_run_goes_on_without_its_reader(monkeypatch, tmp_path, capfd):
    with broken_pipe() as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        options = f"--run-dir {tmp_path} --steps 2 --log-every 1 --batch-size 8 --towers 2 --workers 1"
        assert cli.main(["train", "digits", "--device", "cpu", *options.split()]) == 0
    assert capfd.readouterr().err == (
        "samestep: stdout cannot be written to (Broken pipe); going on without it\n"
    )
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step-00000002"]
    with full_disk() as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert cli.main(["digest", str(tmp_path)]) == 1  # nobody got what it is for
    assert "No space left on device" in capfd.readouterr().err
    monkeypatch.undo()
    assert cli.main(["digest", str(tmp_path)]) == 0
