"""Moving tensors between real processes, over gloo and shared memory; what is said of those that are gone."""

import datetime
import gc
import os
import re
import signal
import socket
import threading
import time
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from samestep.errors import DisagreementError, LostWorkerError
from samestep.workers.collectives import gather_objects
from samestep.workers.ledger import Ledger, Message
from samestep.workers.peers import Peers
from samestep.workers.process_group import ProcessGroup, _Posted, _Watched, how_lost, is_lost_connection
from samestep.workers.transport import Alone
from samestep.workers.waiter import Waiter

SMALL = 2**18 // 4  # float32 numbers up to which a tensor shares a message
LARGE = 2**25  # numbers of which some are on their way for a while
TIMEOUT_S = 2


def everything(rank):
    """Tensors of many dtypes and sizes, whose values say whose they are."""
    generator = torch.Generator().manual_seed(rank)
    bits = torch.randint(0, 2, (3, 5), generator=generator)
    real = torch.randn(3, 5, generator=generator)
    dtypes = (torch.uint8, torch.int64, torch.float64, torch.bfloat16, torch.float16, torch.float32)
    return [
        bits.bool(),
        *(bits.to(dtype) for dtype in dtypes),
        torch.complex(real, -real),
        torch.tensor(rank + 0.5),
        torch.tensor(rank % 2 == 0),
        torch.empty(0, 4),
        torch.randn(SMALL + 1, generator=generator),
        torch.full((7,), -0.0),
    ]


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and repr(left) == repr(right)


def post_to_all(transport, own, shapes_of, what="it"):
    """Send `own` to all others, and return what comes from each of them."""
    others = [rank for rank in range(transport.world_size) if rank != transport.rank]
    incoming = {rank: [torch.zeros_like(tensor) for tensor in shapes_of(rank)] for rank in others}
    transport.post(dict.fromkeys(others, own), incoming, what).wait()
    return incoming


# ---- what runs in each of the processes --------------------------------------------------------------


def moves_any_dtype(transport):
    for rank, tensors in post_to_all(transport, everything(transport.rank), everything).items():
        expected = everything(rank)
        assert all(same(ours, theirs) for ours, theirs in zip(tensors, expected, strict=True))


def keeps_the_order_between_two(transport):
    """Posts may be waited for in another order than they were made."""
    peer = {0: 1, 1: 0}.get(transport.rank)
    if peer is None:
        return
    tensors = [torch.zeros(size) for size in (1, SMALL + 1, 1, 3)]
    posts = []
    for number, tensor in enumerate(tensors):
        own = torch.full_like(tensor, 10 * transport.rank + number)
        posts.append(transport.post({peer: [own]}, {peer: [tensor]}, "it"))
    for pending in reversed(posts):
        pending.wait()
    assert [float(tensor[-1]) for tensor in tensors] == [10 * peer + number for number in range(4)]


def groups_small_tensors_into_one_message(transport):
    messages = []

    class Noted(dist.P2POp):
        def __new__(cls, op, tensor, peer, *, tag):
            messages.append((op.__name__, peer, tensor.nbytes))
            return P2POp(op, tensor, peer, tag=tag)

    P2POp, dist.P2POp = dist.P2POp, Noted
    try:
        own = [torch.ones(SMALL), torch.empty(0), torch.ones(SMALL + 1), torch.ones(3).bool()]
        post_to_all(transport, own, lambda rank: own)
        post_to_all(transport, [torch.empty(0)], lambda rank: [torch.empty(0)])
    finally:
        dist.P2POp = P2POp
    others = sorted({0, 1, 2} - {transport.rank})
    sizes = (4 * SMALL + 3, 4 * SMALL + 4)
    expected = [(op, peer, size) for op in ("irecv", "isend") for peer in others for size in sizes]
    assert sorted(messages) == sorted(expected)


def sends_to_some_only(transport):
    """Around the circle: each to the next."""
    tensor = torch.zeros(2)
    source, target = (transport.rank - 1) % 3, (transport.rank + 1) % 3
    own = torch.full((2,), float(transport.rank))
    transport.post({target: [own]}, {source: [tensor]}, "it").wait()
    assert tensor.tolist() == [source, source]


def fills_strided_places_of_a_flat_tensor(transport):
    flat = torch.zeros(12)
    places = {rank: [flat[4 * rank : 4 * rank + 4]] for rank in range(3)}
    own = places.pop(transport.rank)
    own[0].fill_(transport.rank + 1)
    transport.post(dict.fromkeys(places, own), places, "it").wait()
    assert flat.tolist() == [1] * 4 + [2] * 4 + [3] * 4


def names_a_worker_that_is_gone(transport):
    """Worker 2 leaves without a word."""
    if transport.rank == 2:
        os._exit(0)
    start_s = time.monotonic()
    with pytest.raises(LostWorkerError, match=r"^step 4, gradients: worker 2 is gone \(.*\)$"):
        transport.post({}, {2: [torch.zeros(1)]}, "step 4, gradients").wait()
    with pytest.raises(LostWorkerError, match=r"^step 4, averages: worker 2 is gone \(.*\)$"):
        transport.post({2: [torch.zeros(1)]}, {}, "step 4, averages").wait()
    assert time.monotonic() - start_s < 20  # not after the timeout


def finds_a_worker_that_dies_with_messages_on_their_way(transport):
    """Worker 2 is killed while 0 has received, and 1 has sent, a part of a message: gloo wakes neither."""
    pids = gather_objects(transport, os.getpid(), "pids")
    if transport.rank == 2:
        transport.waiter.peers.ask_for = mock.Mock()  # or 1, if 0 is late, would say that it sends more
    content, received = torch.zeros(LARGE), torch.full((LARGE,), -1.0)
    # Worker 1 has one more to send than 2 asks for, so that some is left, whenever 0 kills it.
    outgoing, incoming = [
        ({}, {2: [received]}),
        ({2: [content] * 4}, {}),
        ({0: [content]}, {1: [torch.empty(LARGE) for _ in range(3)]}),
    ][transport.rank]

    def exchange():
        pending = transport.post(outgoing, incoming, "it")  # worker 1 may be so late that it hears of it here
        while transport.rank == 0 and received[0] == -1:
            pass
        if transport.rank == 0:
            os.kill(pids[2], signal.SIGKILL)
        pending.wait()

    start_s = time.monotonic()
    with pytest.raises(LostWorkerError, match=r"^it: worker 2 is gone \(.*\)$"):
        exchange()
    assert time.monotonic() - start_s < 20  # not after the timeout


def hears_of_a_loss_from_others(transport):
    """Worker 2 leaves, a child of it keeps its connections, and 1 waits for 0, which has lost 2."""
    if transport.rank == 2:
        if os.fork():
            os._exit(0)
        time.sleep(20)
        os._exit(0)
    start_s = time.monotonic()
    source = 2 if transport.rank == 0 else 0
    with pytest.raises(LostWorkerError, match=r"^it: worker 2 is gone \(.*\)$"):
        transport.post({}, {source: [torch.zeros(1)]}, "it").wait()
    assert time.monotonic() - start_s < 15  # while that child lives


def names_a_worker_that_is_silent(transport):
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: is_over.set())
    pids = gather_objects(transport, os.getpid(), "pids")
    if transport.rank == 0:
        with pytest.raises(LostWorkerError, match=rf"^it: worker 1 did not answer for {TIMEOUT_S} s \(.*\)$"):
            transport.post({}, {1: [torch.zeros(1)]}, "it").wait()
        os.kill(pids[1], signal.SIGTERM)
    else:
        assert is_over.wait(30 * TIMEOUT_S)


def tells_of_other_calls(transport):
    """Worker 2 has left a call out: what it sends has another size than 0 waits for; 1 hears of it."""
    leaves_one_out(transport, sizes=(3, 5, 7))


def tells_of_other_calls_with_messages_of_one_size(transport):
    leaves_one_out(transport, sizes=(3, 3, 3))


def leaves_one_out(transport, sizes):
    others = {0: [1, 2], 1: [0], 2: [0]}[transport.rank]
    names = ("step 1, one", "step 1, two (/here)", "step 1, three")
    for what, size in zip(names, sizes, strict=True):
        if "two" in what and transport.rank == 2:
            continue
        found = {other: [torch.zeros(size)] for other in others}
        own = {other: [torch.ones(size)] for other in others}
        if "one" in what:
            transport.post(own, found, what.replace("1", str(transport.rank))).wait()
            continue
        both = re.escape(f"worker 0 is at '{names[1]}', and worker 2 at '{names[2]}'")
        if transport.rank == 1:  # worker 0 has sent it what it asks for, and nothing after that
            transport.post({}, found, what).wait()
        with pytest.raises(DisagreementError, match=f"^[^:]*: {both}: expected all workers to make the same"):
            transport.post(own, found, what).wait()
        with pytest.raises(DisagreementError, match=r"^four: worker 0 is at 'step 1, two"):
            transport.post(own, found, "four")
        return


def goes_on_after_both_were_stopped(transport):
    """For longer than the timeout, while 0 waits for 1, which works before and after."""
    pids = gather_objects(transport, os.getpid(), "pids")
    if transport.rank == 0 and not os.fork():
        for signal_number, after_s in ((signal.SIGSTOP, TIMEOUT_S / 4), (signal.SIGCONT, 2 * TIMEOUT_S)):
            time.sleep(after_s)
            for pid in pids:
                os.kill(pid, signal_number)
        os._exit(0)
    found, own = torch.zeros(1), torch.ones(1)
    if transport.rank == 1:
        time.sleep(TIMEOUT_S / 2)
        time.sleep(TIMEOUT_S / 4)
    transport.post({1 - transport.rank: [own]}, {1 - transport.rank: [found]}, "it").wait()
    assert float(found) == 1


def goes_on_waiting_after_an_interrupt(transport):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    found = torch.zeros(5)
    if transport.rank == 1:
        time.sleep(0.5)
        transport.post({0: [torch.ones(2), torch.ones(3)]}, {}, "it").wait()
        return
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    pending = transport.post({}, {1: list(found.split([2, 3]))}, "it")
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    assert not found.any()
    pending.wait()
    assert found.all()


def sends_from_shared_memory(transport):
    """What lies in its memory may be forgotten at once, and is not overwritten before it was read."""
    others = [rank for rank in range(3) if rank != transport.rank]
    for size in (1, SMALL, 5, SMALL, 3 * SMALL, LARGE // 8, SMALL):
        incoming = {rank: [torch.zeros(3), torch.zeros(size)] for rank in others}
        row = transport.empty(size, torch.empty(0))
        row.fill_(transport.rank + size)
        pending = transport.post({rank: [torch.ones(3), row] for rank in others}, incoming, "it")
        del row
        transport.empty(size, torch.empty(0)).fill_(-1)
        if transport.rank == 1:
            time.sleep(0.05)
        pending.wait()
        for rank, (ones, found) in incoming.items():
            assert ones.all()
            assert (found == rank + size).all()


COMMON = [
    moves_any_dtype,
    keeps_the_order_between_two,
    sends_to_some_only,
    fills_strided_places_of_a_flat_tensor,
    sends_from_shared_memory,
    names_a_worker_that_is_gone,
]
JOBS = [
    ([0, 1, 2], 30, [groups_small_tensors_into_one_message, *COMMON]),
    ([0, 1, 2], 30, [finds_a_worker_that_dies_with_messages_on_their_way]),
    ([0, 1, 2], 30, [hears_of_a_loss_from_others]),
    (
        [0, 1],
        TIMEOUT_S,
        [
            goes_on_waiting_after_an_interrupt,
            names_a_worker_that_is_silent,
        ],
    ),
    ([0, 1], TIMEOUT_S, [goes_on_after_both_were_stopped]),
    ([0, 1, 2], 30, [tells_of_other_calls]),
    ([0, 1, 2], 30, [tells_of_other_calls_with_messages_of_one_size]),
]
"""The workers, the timeout, and what they do; in the last check of three workers, worker 2 is lost."""

KINDS = ("gloo", "shared memory")
OF_GLOO = (groups_small_tensors_into_one_message, finds_a_worker_that_dies_with_messages_on_their_way)


def checks_of(kind, checks):
    return [check for check in checks if kind == "gloo" or check not in OF_GLOO]


def serve(rank, number, kind, folder, results):
    """Be one worker of a job, and tell how each check went."""
    torch.set_num_threads(1)
    ranks, timeout_s, checks = JOBS[number]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/{kind}{number}", len(ranks)),
        rank=rank,
        world_size=len(ranks),
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    transport = ProcessGroup(torch.device("cpu"), timeout_s)
    transport._shares_memory = kind == "shared memory"
    transport.connect()
    if kind == "shared memory":
        assert all(other in transport.shared for other in ranks if other != rank)
    assert (transport.rank, transport.world_size) == (rank, len(ranks))
    for check in checks_of(kind, checks):
        try:
            check(transport)
            results.put((kind, rank, check.__name__, "fine"))
        except BaseException:
            results.put((kind, rank, check.__name__, traceback.format_exc()[-2000:]))
    transport.close()
    assert not dist.is_initialized()


@pytest.fixture(scope="module")
def found(forkserver, tmp_path_factory):
    """How each check went on each worker."""
    results = forkserver.SimpleQueue()
    folder = str(tmp_path_factory.mktemp("store"))
    workers = [
        forkserver.Process(target=serve, args=(rank, number, kind, folder, results))
        for kind in KINDS
        for number, (ranks, _, _) in enumerate(JOBS)
        for rank in ranks
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        worker.kill()
    answers = {}
    while not results.empty():
        kind, rank, name, text = results.get()
        answers[kind, name, rank] = text
    return answers


@pytest.mark.parametrize(
    ("kind", "check", "num_told"),
    [
        (kind, check, 3 if len(ranks) == 3 and check is not checks[-1] else 2)
        for kind in KINDS
        for ranks, _, checks in JOBS
        for check in checks_of(kind, checks)
    ],
    ids=lambda check: getattr(check, "__name__", ""),
)
def test_between_processes(found, kind, check, num_told):
    assert [found.get((kind, check.__name__, rank)) for rank in range(num_told)] == ["fine"] * num_told


# ---- without processes -------------------------------------------------------------------------------


def test_nothing_is_posted_once_a_worker_is_lost(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    transport = ProcessGroup(torch.device("cpu"), 1.0)
    transport.waiter.first_error(LostWorkerError("worker 1 did not answer for 1 s"))
    with pytest.raises(LostWorkerError, match="step 3: worker 1 did not answer for 1 s"):
        transport.post({1: [torch.zeros(1)]}, {1: [torch.zeros(1)]}, "step 3")


def test_nothing_is_posted_after_an_interrupt_among_messages_and_others_know(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    here, there = socket.socketpair()
    transport, other = ProcessGroup(torch.device("cpu"), 1.0), Peers({0: there})
    transport.waiter.peers = Peers({1: here})
    monkeypatch.setattr(transport, "post", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        gather_objects(transport, 1, "checkpoint one")
    monkeypatch.undo()
    sentence = "worker 0 was interrupted in the middle of checkpoint one"
    with pytest.raises(LostWorkerError, match=f"step 3: {sentence}"):
        transport.post({1: [torch.zeros(1)]}, {1: [torch.zeros(1)]}, "step 3")
    other.look()
    assert str(other.error()) == sentence
    here.close()
    there.close()


def test_who_waits_asks_twice_as_late_each_time():
    """Who is always late never has to wait, and so never reads what it is asked."""
    message = Message(4, 640, "step 2, the update")
    waiter, asked, looks = Waiter(1.0), [], []
    waiter.peers.ask_for = lambda worker, wanted: asked.append((worker, wanted, len(looks)))
    posted = _Posted("step 2", 0, waiter, Ledger(), {1: message})
    calls = mock.Mock(worker=1, error=None, is_done=lambda timeout_s: False)
    watched = _Watched(calls, posted)
    while len(looks) < 200:
        looks.append(None)
        waiter.peers.num_asked[1] = len(asked)
        assert not watched.is_done(0)
    assert asked == [
        (1, message, 10),
        (1, message, 20),
        (1, message, 40),
        (1, message, 80),
        (1, message, 160),
    ]
    for _ in range(1000):  # further waits of ten seconds each
        later = _Watched(calls, posted)
        waiter.peers.num_asked[1] = len(asked)
        assert not any(later.is_done(0) for _ in range(100))
    assert len(asked) == 5


@pytest.mark.parametrize("asked", [Message(1, size, "step 2, the update") for size in (12, 640)])
def test_who_has_sent_another_message_says_so_at_once(asked):
    waiter, ledger = Waiter(1.0), Ledger()
    for num_bytes in (8, 640):
        ledger.send(1, num_bytes, "step 3, gradients")
    calls = mock.Mock(worker=1, error=None, is_done=lambda timeout_s: False)
    watched = _Watched(calls, _Posted("step 3, averages", 0, waiter, ledger))
    for fine in (Message(2, 12, "not sent yet"), Message(1, 640, "step 4, gradients")):
        waiter.peers.asked[1] = fine
        assert not watched.is_done(0)
    waiter.peers.asked[1] = asked
    assert watched.is_done(0)
    calls_of_both = "worker 0 is at 'step 3, gradients', and worker 1 at 'step 2, the update': expected all "
    assert str(watched.error).startswith(calls_of_both)


def test_a_worker_alone_has_nobody_to_wait_for():
    transport = Alone()
    assert (transport.rank, transport.world_size) == (0, 1)
    transport.post({}, {}, "it").wait()
    transport.close()


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed"), True),
        (dist.DistNetworkError("the client socket has timed out after 2 s"), True),
        (dist.DistStoreError("wait timeout"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("no"), False),
        (LostWorkerError("step 3: worker 1 is gone (/gloo/)"), False),
    ],
)
def test_errors_about_a_lost_connection(error, is_lost):
    assert is_lost_connection(error) == is_lost


@pytest.mark.parametrize(
    ("text", "why", "how"),
    [
        ("[/gloo/a.cc:1] Connection closed [::1]:80. More", "Connection closed [::1]:80", "is gone"),
        ("[/gloo/b.cc:2] Timed out waiting 2 s", "Timed out waiting 2 s", "did not answer"),
        ("wait timeout\nException raised from", "wait timeout", "did not answer"),
        ("timed out: Connection refused", "timed out: Connection refused", "is gone"),
    ],
)
def test_lost_workers_are_gone_or_silent(text, why, how):
    assert str(how_lost(RuntimeError(text), 1)) == f"worker 1 {how} ({why})"
    assert str(how_lost(RuntimeError(text))) == f"another worker {how} ({why})"


def in_a_fork():
    """Return how a forked process ends whose garbage collector may free what it has inherited."""
    gc.unfreeze()
    pid = os.fork()
    if pid == 0:
        os._exit(gc.get_freeze_count() == 0)
    return os.waitpid(pid, 0)[1]


def test_a_forked_process_frees_no_process_group(elsewhere):
    assert elsewhere(in_a_fork) == 0
