"""No change to a checkpoint's files is ever a wrong load, foreign code, or an error of another kind."""

import json
import random
import shutil
import struct

import pytest
from hypothesis import given, settings, strategies as st

from samestep.errors import DataError, Error

from . import forgery
from .forgery import parts, reseal, state_of, trained

FILES = ("manifest.json", "model.safetensors", "training.json", "training.safetensors")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return forgery.save(tmp_path_factory.mktemp("original") / "one")


@pytest.fixture(scope="module")
def victim(path):
    return shutil.copytree(path, path.with_name("victim"))


def check_exact(victim):
    """Load: all of what was saved, or an error that names the checkpoint and changes nothing."""
    into = USED
    before = state_of(*into)
    try:
        assert forgery.load(victim, parts())[1] == SAVED
    except Error as error:
        check_line(error, victim)
        with pytest.raises(Error):
            forgery.load(victim, into)
        assert state_of(*into) == before
        return False
    return True


def check_own_kind(victim):
    """Load: anything, or an error that names the checkpoint and changes nothing."""
    into = parts()
    before = state_of(*into)
    try:
        forgery.load(victim, into)
    except Error as error:
        check_line(error, victim)
        assert state_of(*into) == before


def check_line(error, victim):
    assert isinstance(error, DataError)
    assert str(victim) in str(error)
    assert str(error).isprintable()
    assert len(str(error)) < 1000


USED = trained()
SAVED = state_of(*trained())


# ---- accidents -----------------------------------------------------------------------------------------


def changed(content, generator):
    """Return content after one accident."""
    at = generator.randrange(len(content))
    match generator.randrange(6):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + content[at + 1 :]
        case 2:
            return content[:at] + bytes([generator.randrange(256)]) + content[at:]
        case 3:
            end = at + generator.randrange(64)
            return content[:at] + bytes(len(content[at:end])) + content[end:]
        case 4:
            return content[:at] + content[:at] + content[at:]
    return content[:at] + bytes([content[at] ^ 1 << generator.randrange(8)]) + content[at + 1 :]


def flips(content, every):
    """Yield content with one bit flipped, for all bits of all or some bytes."""
    for at in range(0, len(content), every):
        for bit in range(8) if every == 1 else (at % 8,):
            yield content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def run_accidents(victim, name, variants):
    file = victim / name
    content = file.read_bytes()
    accepted = []
    try:
        for variant in variants(content):
            if variant != content:
                file.write_bytes(variant)
                if check_exact(victim):
                    accepted.append(variant)
    finally:
        file.write_bytes(content)
    # Only in the manifest is there room for a change that means nothing: other white space.
    assert all(variant.split() == content.split() or name == "manifest.json" for variant in accepted)
    return accepted


@pytest.mark.sampled
@pytest.mark.parametrize("name", FILES)
def test_accidents(victim, name):
    generator = random.Random(name)
    run_accidents(victim, name, lambda content: (changed(content, generator) for _ in range(40)))
    run_accidents(victim, name, lambda content: flips(content, every=37))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FILES)
def test_every_bit(victim, name):
    generator = random.Random(name)
    run_accidents(victim, name, lambda content: flips(content, every=1))
    run_accidents(victim, name, lambda content: (changed(content, generator) for _ in range(5000)))


# ---- hostile hands -------------------------------------------------------------------------------------

TAGS = ("$tensor", "$tuple", "$dict", "$counter", "$float", "order", "$call", "state", "params", "0.weight")
TEXTS = st.sampled_from((*TAGS, "optimizer.state.0.exp_avg", "inf", "F32", "\x1b[2J\n", "\ud800", "../x", ""))
TOO_LARGE = "1e999"  # where a text is this, it is written without quotes
NUMBERS = st.one_of(
    st.integers(-3, 9), st.sampled_from((2**63, -(2**63), 2**64, 10**30, 1e308, -0.0, 0.5, TOO_LARGE))
)
PAIRS = ("$dict", "$counter")
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(TEXTS, inner, max_size=3),
        st.builds(
            lambda tag, items: {tag: [list(item) for item in items]},
            st.sampled_from(PAIRS),
            st.lists(st.tuples(inner, inner), max_size=2),
        ),
    ),
    max_leaves=8,
)


def as_json(nest):
    return json.dumps(nest).replace(f'"{TOO_LARGE}"', TOO_LARGE)


def spots(nest, found=None):
    """Return each (container, key) in a nest."""
    found = [] if found is None else found
    items = nest.items() if isinstance(nest, dict) else enumerate(nest) if isinstance(nest, list) else ()
    for key, value in items:
        found.append((nest, key))
        spots(value, found)
    return found


def replace_somewhere(nest, where, value):
    places = spots(nest)
    container, key = places[where % len(places)]
    container[key] = value


def restore(path, victim):
    for name in FILES:
        shutil.copyfile(path / name, victim / name)


WHERE = st.integers(0, 10_000)


@given(where=WHERE, value=VALUES)
@settings(max_examples=25)
def test_forged_outlines(path, victim, where, value):
    restore(path, victim)
    outline = json.loads((victim / "training.json").read_text())
    replace_somewhere(outline, where, value)
    (victim / "training.json").write_text(as_json(outline))
    reseal(victim)
    check_own_kind(victim)


@given(
    tag=st.sampled_from(("$counter", "$dict", "$tuple", "$float", "$tensor")),
    value=VALUES,
    where=st.sampled_from(("own", "state", "kinds", "extra", "best")),
)
@settings(max_examples=25)
def test_forged_tags(path, victim, tag, value, where):
    restore(path, victim)
    outline = json.loads((victim / "training.json").read_text())
    (outline["state"] if where == "best" else outline[where])["best"] = {tag: value}
    (victim / "training.json").write_text(as_json(outline))
    reseal(victim)
    check_own_kind(victim)


@given(where=WHERE, value=VALUES)
@settings(max_examples=25)
def test_forged_manifests(path, victim, where, value):
    restore(path, victim)
    values = json.loads((victim / "manifest.json").read_text())
    replace_somewhere(values, where, value)
    if TOO_LARGE not in json.dumps(values):  # no seal fits it
        forgery.seal(victim / "manifest.json", values)
        check_own_kind(victim)


@given(where=WHERE, value=VALUES, name=st.sampled_from(("model", "training")))
@settings(max_examples=25)
def test_forged_headers(path, victim, where, value, name):
    restore(path, victim)
    file = victim / f"{name}.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    replace_somewhere(header, where, value)
    text = as_json(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    reseal(victim)
    check_own_kind(victim)


@pytest.mark.sampled
@pytest.mark.parametrize("name", FILES[1:])
def test_resealed_accidents(path, victim, name):
    run_resealed(path, victim, name, 40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FILES[1:])
def test_many_resealed_accidents(path, victim, name):
    run_resealed(path, victim, name, 10_000)


def run_resealed(path, victim, name, count):
    generator = random.Random(name)
    content = (path / name).read_bytes()
    for _ in range(count):
        restore(path, victim)
        (victim / name).write_bytes(changed(content, generator))
        reseal(victim)
        check_own_kind(victim)
