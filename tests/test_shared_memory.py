"""What workers of one host send each other: all of them in one process here, each in its turn."""

import os
import resource
import socket
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from samestep.errors import DisagreementError
from samestep.memory import segments
from samestep.memory.channel import LONGEST, Channel
from samestep.memory.shared_memory import SharedMemory

LIKE = torch.empty(0)
FILES = {str(Path(segments.__file__).with_name(f"{name}.py")) for name in ("channel", "shared_memory")}


class Team:
    """Workers of one host."""

    def __init__(self, num_workers):
        channels = [{} for _ in range(num_workers)]
        for first in range(num_workers):
            for second in range(first):
                ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                channels[first][second], channels[second][first] = map(Channel, ends)
        self.channels = channels
        self.workers = [SharedMemory(rank, each) for rank, each in enumerate(channels)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for worker in self.workers:
            worker.close()

    def __getitem__(self, rank):
        return self.workers[rank]


def finish(*deliveries):
    """Wait for all of them in turn."""
    for _ in range(1000):
        if min(delivery.is_done(0) for delivery in deliveries):
            assert all(delivery.error is None for delivery in deliveries)
            return
    raise AssertionError("it does not end")


def swap(team, tensors, received):
    """Let two workers send each other one tensor each."""
    posts = [
        team[rank].post({1 - rank: [tensors[rank]]}, {1 - rank: [received[rank]]}, "it") for rank in (0, 1)
    ]
    finish(*posts)


def interrupted(call, at):
    """Call it, with an interrupt at this line that it runs in the transport; return whether it got there."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


sizes = st.sampled_from([0, 1, 3, 4095, 4096, LONGEST // 4, LONGEST // 4 + 1, 100_000])


@given(st.lists(st.lists(st.tuples(sizes, st.booleans()), max_size=3), min_size=1, max_size=4), st.randoms())
def test_whatever_is_sent_arrives_in_whatever_order_they_wait(messages, random):
    with Team(3) as team:
        deliveries, expected = [], []
        for number, message in enumerate(messages):
            for rank in range(3):
                tensors = [team[rank].empty(n, LIKE) if lies else torch.empty(n) for n, lies in message]
                for place, tensor in enumerate(tensors):
                    tensor.fill_(100 * number + 10 * rank + place)
                others = [other for other in range(3) if other != rank]
                incoming = {other: [torch.full((n,), -1.0) for n, _ in message] for other in others}
                deliveries.append((tensors, team[rank].post(dict.fromkeys(others, tensors), incoming, "it")))
                expected += [
                    (found, 100 * number + 10 * other + place)
                    for other in others
                    for place, found in enumerate(incoming[other])
                ]
        random.shuffle(deliveries)
        finish(*(delivery for _, delivery in deliveries))
        assert all((found == value).all() for found, value in expected)


def test_many_small_tensors_and_large_ones_outside():
    with Team(2) as team:
        tensors = [[torch.full((n % 7,), float(n + rank)) for n in range(3000)] for rank in (0, 1)]
        large = [torch.full((3_000_000,), float(rank)) for rank in (0, 1)]
        received = [[torch.empty_like(t) for t in [*tensors[0], large[0]]] for _ in (0, 1)]
        outgoing = [[*tensors[rank], large[rank]] for rank in (0, 1)]
        posts = [team[r].post({1 - r: outgoing[r]}, {1 - r: received[r]}, "it") for r in (0, 1)]
        finish(*posts)
        for rank in (0, 1):
            assert all(torch.equal(a, b) for a, b in zip(received[rank], outgoing[1 - rank], strict=True))


def test_what_was_sent_and_received_can_be_resized():  # as observers of quantisation do in their first pass
    with Team(2) as team:
        tensors = [torch.zeros(1), torch.zeros(1)]
        received = [torch.ones(1), torch.ones(1)]
        swap(team, tensors, received)
        assert all(tensor.resize_(4).shape == (4,) for tensor in [*tensors, *received])


def test_an_interrupt_at_any_line_of_a_wait_loses_nothing():
    at, got_there = 1, True
    while got_there:
        with Team(2) as team:
            sent = [team[0].empty(5000, LIKE).fill_(1), torch.arange(20_000.0), torch.ones(3)]
            received = [torch.empty_like(tensor) for tensor in sent]
            back = torch.zeros(4)
            posts = [
                team[0].post({1: sent}, {1: [back]}, "it"),
                team[1].post({0: [torch.ones(4)]}, {0: received}, "it"),
            ]
            got_there = max(interrupted(lambda post=post: post.is_done(0), at) for post in posts)
            finish(*posts)
            assert back.all()
            assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))
            finish(*(team[r].post({1 - r: [torch.ones(1)]}, {1 - r: [torch.ones(1)]}, "it") for r in (0, 1)))
        at += 1
    assert at > 100


# ---- memory ------------------------------------------------------------------------------------------


def test_memory_is_lent_again_once_it_was_read_and_its_tensors_are_gone():
    with Team(2) as team:
        row = team[0].empty(50_000, LIKE)
        address, row[:] = row.data_ptr(), 1
        received = torch.zeros(25_000)
        part = row[25_000:]
        posts = [team[0].post({1: [part]}, {}, "it"), team[1].post({}, {0: [received]}, "it")]
        del row
        finish(posts[0])
        assert team[0].empty(50_000, LIKE).data_ptr() != address, "a tensor lies there"
        del part, posts[0]
        assert team[0].empty(50_000, LIKE).data_ptr() != address, "nobody has read it"
        finish(*posts)
        assert received.all()
        assert team[0].empty(50_000, LIKE).data_ptr() == address
        assert team[0].empty(20_000, LIKE).data_ptr() != address, "that would waste more than half of it"


def test_memory_of_sizes_that_are_no_more_is_let_go(monkeypatch):
    def num_descriptors():
        return len(os.listdir("/proc/self/fd"))

    def exchange(size):
        sent = [team[rank].empty(size, LIKE).fill_(rank) for rank in (0, 1)]
        received = [torch.full((size,), -1.0) for _ in (0, 1)]
        swap(team, sent, received)
        assert [found.unique().tolist() for found in received] == [[1], [0]]

    with Team(2) as team:
        exchange(5000)
        before = num_descriptors()
        for number in range(20):
            exchange(20_000 * 3**number % 700_001 + 5000)
        assert num_descriptors() > before
        for _ in range(300):
            exchange(5000)
        assert num_descriptors() == before
        assert [len(worker._theirs) for worker in team.workers] == [1, 1]


def test_tensors_outlive_the_connections():
    with Team(2) as team:
        row = team[0].empty(10_000, LIKE).fill_(7)
    assert (row == 7).all()


def refuse(*_, **__):
    raise OSError(1, "Operation not permitted")


@pytest.mark.parametrize("missing", ["memfd_create", "posix_fallocate", "mmap", None])
def test_without_memory_it_goes_through_sockets_and_that_is_said_once(monkeypatch, missing):
    with Team(2) as team:
        if missing is None:
            monkeypatch.delattr(os, "memfd_create")
        elif missing == "mmap":
            monkeypatch.setattr(torch, "from_file", raising_runtime_error)
            monkeypatch.setattr(segments.mmap, "mmap", refuse)
        else:
            monkeypatch.setattr(os, missing, refuse)
        reason = "Function not implemented" if missing is None else "Operation not permitted"
        before = len(os.listdir("/proc/self/fd"))
        with pytest.warns(
            UserWarning, match=rf"^worker \d: no shared memory for 400000 bytes \({reason}\): gra"
        ) as said:
            sent = [team[rank].empty(100_000, LIKE).fill_(rank) for rank in (0, 1)]
        assert sorted(str(each.message)[:9] for each in said) == ["worker 0:", "worker 1:"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            received = [team[rank].empty(100_000, LIKE) for rank in (0, 1)]
        swap(team, sent, received)
        assert [found.unique().tolist() for found in received] == [[1], [0]]
        assert len(os.listdir("/proc/self/fd")) == before


def raising_runtime_error(*_, **__):
    raise RuntimeError("unable to open file </proc/self/fd/9> in read-write mode")


def test_what_torch_cannot_map_is_mapped_otherwise(monkeypatch):
    monkeypatch.setattr(torch, "from_file", raising_runtime_error)
    with Team(2) as team:
        sent = [team[rank].empty(10_000, LIKE).fill_(rank) for rank in (0, 1)]
        received = [torch.full((10_000,), -1.0) for _ in (0, 1)]
        swap(team, sent, received)
        assert [found.unique().tolist() for found in received] == [[1], [0]]


@pytest.fixture
def few_descriptors():
    """Leave this many descriptors to the process, once it is called."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []

    def leave(num_free):
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(num_free):
            os.close(held.pop())

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    for descriptor in held:
        os.close(descriptor)


@pytest.mark.parametrize("num_free", [0, 1])
def test_memory_that_cannot_be_mapped_is_not_read_as_zeros(few_descriptors, num_free):
    with Team(2) as team:
        row = team[0].empty(10_000, LIKE).fill_(3)
        team[0].post({1: [row]}, {}, "it")
        received = torch.full((10_000,), -1.0)
        post = team[1].post({}, {0: [received]}, "it")
        few_descriptors(num_free)
        with pytest.warns(UserWarning, match="Too many open files"):  # an error here would not be announced
            team[1].empty(10_000, LIKE)
        for _ in range(2):
            with pytest.raises(
                DisagreementError,
                match=r"^worker 1 cannot map shared memory of worker 0 \(Too many open files\): raise its",
            ):
                post.is_done(0)
        assert (received == -1).all()


def test_memory_takes_one_descriptor_of_its_owner_and_none_of_others():
    with Team(2) as team:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(5):
            sent = [team[rank].empty(50_000 << number, LIKE) for rank in (0, 1)]
            swap(team, sent, [torch.empty_like(tensor) for tensor in sent])
        assert len(os.listdir("/proc/self/fd")) == before + 2 * 5


def test_all_of_it_is_reserved():
    descriptor = segments.allocate(10_000)
    assert os.fstat(descriptor).st_blocks * 512 >= 10_000
    os.close(descriptor)


# ---- who is gone -------------------------------------------------------------------------------------


def test_what_a_worker_sent_before_it_ended_arrives():
    with Team(2) as team:
        row = team[0].empty(10_000, LIKE).fill_(3)
        team[1].post({0: [torch.ones(2)]}, {}, "it")  # which 0 never reads
        team[0].post({1: [row, torch.ones(1)]}, {}, "it")
        team[0].close()
        del row
        received = [torch.zeros(10_000), torch.zeros(1)]
        post = team[1].post({}, {0: received}, "it")
        finish(post)
        assert [found.unique().tolist() for found in received] == [[3], [1]]
        post = team[1].post({}, {0: received}, "it")
        assert post.is_done(0)
        assert (post.worker, str(post.error)) == (0, "its connections are closed")


def test_a_worker_that_ends_in_the_middle_of_a_message():
    with Team(2) as team:
        team[0].post({1: [torch.ones(3_000_000)]}, {}, "it")  # of which the socket takes a part
        post = team[1].post({}, {0: [torch.zeros(3_000_000)]}, "it")
        assert not post.is_done(0)
        team[0].close()
        assert post.is_done(0)
        assert (post.worker, str(post.error)) == (0, "its connections are closed")


def test_a_worker_that_takes_no_more():
    with Team(2) as team:
        team[0].close()
        post = team[1].post({0: [torch.ones(1)]}, {}, "it")
        assert post.is_done(0)
        assert (post.worker, post.error is None) == (0, False)


@pytest.mark.parametrize("sizes", [[3, 7], [8]], ids=["another size", "the same size"])
def test_workers_that_make_different_calls_are_told_so(sizes):
    with Team(2) as team:
        team[0].post({1: list(map(torch.ones, sizes))}, {}, "checkpoint D")
        post = team[1].post({}, {0: [torch.ones(8)]}, "step 3, gradients")
        assert post.is_done(0)
        assert type(post.error) is DisagreementError
        assert str(post.error) == (
            "worker 0 is at 'checkpoint D', and worker 1 at 'step 3, gradients': expected all workers to "
            "make the same calls in the same order"
        )


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("step 3, gradients", "step 12, gradients"),
        ("saving a checkpoint (/mnt/a)", "saving a checkpoint (/data/b (2))"),
        (300 * "é", 300 * "é"),
    ],
)
def test_numbers_and_what_is_in_brackets_may_differ(here, there):
    with Team(2) as team:
        received = torch.zeros(8)
        finish(team[0].post({1: [torch.ones(8)]}, {}, here), team[1].post({}, {0: [received]}, there))
        assert received.all()


def test_nobody_waits_for_what_was_not_asked_for():
    """It stays where it is, and does not keep others awake."""
    with Team(3) as team:
        team[0].post({2: [torch.ones(1)]}, {}, "it")
        received = torch.zeros(1)
        waiting = team[2].post({}, {1: [received]}, "it")
        assert not waiting.is_done(0.01)
        finish(waiting, team[1].post({2: [torch.ones(1)]}, {}, "it"))
        assert received.all()
        finish(team[2].post({}, {0: [received.zero_()]}, "it"))
        assert received.all()
