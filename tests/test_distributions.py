"""What is published: a wheel and an sdist, whole, and at work where only what the core needs is installed."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
LINK = re.compile(r"\]\(([^)\s]+)\)")

pytestmark = pytest.mark.packages


def run(*command, **options):
    """Run a command, without what this process's own Python looks for; return the finished process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, **options)


def done(*command, **options):
    """Run a command that has to succeed without a word on stderr, and return what it prints."""
    finished = run(*command, **options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, and the sdist that it is built from; the tools are installed, so nothing is fetched."""
    folder = tmp_path_factory.mktemp("dist")
    done(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def described(built):
    """The metadata, as a package index reads them."""
    with zipfile.ZipFile(built[0]) as wheel:
        return message_from_bytes(wheel.read(f"samestep-{VERSION}.dist-info/METADATA"))


def test_the_index_takes_both(built):
    done(sys.executable, "-m", "twine", "check", "--strict", *built)


def test_the_sdist_holds_all_files_and_no_others(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    listed = done("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard")
    assert names - {"PKG-INFO"} == {name for name in listed.splitlines() if (ROOT / name).exists()}


def test_the_wheel_holds_the_package_alone(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if not name.startswith(f"samestep-{VERSION}.dist-info/")}
    sources = (
        path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    assert names == {str(path.relative_to(ROOT / "src")) for path in sources}


def test_licences_links_and_types_are_told(described):
    assert described["License-Expression"] == "Apache-2.0 AND CC-BY-4.0"
    assert len(described.get_all("License-File")) == 2
    names = {link.partition(",")[0] for link in described.get_all("Project-URL")}
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= names
    assert "Typing :: Typed" in described.get_all("Classifier")


def test_the_readme_on_an_index_links_to_files_of_this_version(described):
    text, home = described.get_payload(decode=True).decode(), PROJECT["urls"]["Homepage"]
    links, prefix = LINK.findall(text), f"{home}/blob/v{VERSION}/"
    assert any(link.startswith(prefix) for link in links)
    for link in links:
        assert re.match(r"https://|#", link), link
        if link.startswith(home):
            assert (ROOT / link.removeprefix(prefix).partition("#")[0]).exists(), link
    assert LINK.sub("", text) == LINK.sub("", (ROOT / "README.md").read_text())


# ---- an environment with the core's needs alone ----------------------------------------------------------


def needs_of(names):
    """Return the packages that are installed here of some and of all that these need."""
    found, open_ = {}, list(names)
    while open_:
        name = open_.pop()
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        requirements = map(Requirement, found[name].requires or [])
        open_ += [
            need.name for need in requirements if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
    return list(found.values())


def link_to(package, site):
    """Make a package that is installed here importable from elsewhere."""
    for top in {file.parts[0] for file in package.files if ".." not in file.parts}:
        if not (site / top).exists():
            (site / top).symlink_to(package.locate_file(top))


@pytest.fixture(scope="module")
def bare(built, tmp_path_factory):
    """The commands' folder of an environment with the wheel, and nothing that is an extra's."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(done(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for package in needs_of(Requirement(need).name for need in PROJECT["dependencies"]):
        link_to(package, site)
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    done(*pip, "install", "--no-index", built[0])  # it refuses where a need is missing
    return folder / "bin"


def test_the_bare_environment_is_bare(bare):
    for package in ("rich", "tensorboard", "requests", "PIL", "pytest"):
        assert run(bare / "python", "-c", f"import {package}").returncode == 1


def test_version_and_help(bare):
    assert done(bare / "samestep", "--version") == f"samestep {VERSION}\n"
    assert "train" in done(bare / "samestep", "--help")
    assert "cifar10" in done(bare / "samestep", "train", "--help")


def test_a_step_on_one_and_two_workers(bare, tmp_path):
    ends = []
    for workers in ("1", "2"):
        options = ("--steps", "1", "--towers", "2", "--workers", workers, "--run-dir", tmp_path / workers)
        finished = run(bare / "samestep", "train", "digits", *options, cwd=tmp_path)
        assert finished.returncode == 0, finished.stderr
        (line,) = finished.stderr.splitlines()
        assert line.endswith("pip install 'samestep[tensorboard]'")
        ends.append(finished.stdout.splitlines()[-1])
    assert ends[0].startswith("weights sha256 ")
    assert ends[1] == ends[0]


def test_what_wants_an_extra_says_which(bare, tmp_path):
    finished = run(
        bare / "samestep", "train", "cifar10", "--data-dir", tmp_path, "--workers", "1", cwd=tmp_path
    )
    (line,) = finished.stderr.splitlines()
    assert finished.returncode == 2
    assert "requests is not installed: pip install 'samestep[cifar10]'" in line


def test_an_example_of_the_sdist(bare, built, tmp_path):
    with tarfile.open(built[1]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    example = tmp_path / f"samestep-{VERSION}" / "examples" / "towers.py"
    assert "weights sha256 " in done(bare / "python", example, cwd=tmp_path)
