import contextlib
import errno
import gc
import gzip
import hashlib
import http.server
import io
import multiprocessing
import os
import random
import resource
import shutil
import socket
import tarfile
import threading
import time

import numpy as np
import pytest

from samestep.checkpoint.file_lock import FileLock
from samestep.checkpoint.folder import Folder
from samestep.errors import DataError, Error, MissingFileError
from samestep.recipes.cifar10 import download
from samestep.recipes.cifar10.data import Cifar10, ensure_cifar10

pytestmark = pytest.mark.sampled(5)

FOLDER, FILE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
NAMES = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
NUM = 10


def batch_file():
    records = np.random.default_rng(0).integers(0, 256, (NUM, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    return records.tobytes()


def entry(name, content=b"", **attributes):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return info, io.BytesIO(content)


def make_archive(*more):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for info, content in [*(entry(f"{FOLDER}/{name}", batch_file()) for name in NAMES), *more]:
            tar.addfile(info, content)
    return packed.getvalue()


ARCHIVE = make_archive()


def md5(content):
    return hashlib.md5(content).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves one content under any path, and notes what was asked for."""

    daemon_threads = True

    def __init__(self, content):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.requests, self.status, self.break_off_at = content, [], 200, None
        self.answer, self.is_over = None, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/data/"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        if self.server.answer is not None:
            self.server.answer(self)
            return
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content[: self.server.break_off_at])
        if self.server.break_off_at is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(content):
    with Server(content) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.is_over.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def server():
    with serving(ARCHIVE) as server:
        yield server


def left_behind(data_dir):
    return sorted(path.name for path in data_dir.iterdir() if not path.name.endswith(".lock"))


def refuse(data_dir, server, kind, reported, checksum=None):
    """Expect one line that tells what to do, and nothing that a later run would take for good."""
    with pytest.raises(kind, match=reported) as error:
        ensure_cifar10(data_dir, base_url=server.url, md5=checksum or md5(server.content))
    message = str(error.value)
    assert "\n" not in message
    assert error.value.exit_status == 2
    assert not (data_dir / FOLDER).exists()
    with pytest.raises(MissingFileError):
        Cifar10("test", data_dir, num_records=NUM)
    return message


def test_the_archive_is_fetched_once_and_unpacked(tmp_path, server):
    folder = ensure_cifar10(tmp_path / "data", base_url=server.url, md5=md5(ARCHIVE))
    assert folder == tmp_path / "data" / FOLDER
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    assert len(Cifar10("train", tmp_path / "data", num_records=NUM)) == 5 * NUM
    assert left_behind(tmp_path / "data") == [FOLDER, FILE]
    assert ensure_cifar10(tmp_path / "data", base_url=server.url, md5=md5(ARCHIVE)) == folder
    assert server.requests == [f"/data/{FILE}"]


def test_an_archive_that_is_there_is_not_fetched(tmp_path, server):
    (tmp_path / FILE).write_bytes(ARCHIVE)
    ensure_cifar10(tmp_path, base_url=server.url.rstrip("/"), md5=md5(ARCHIVE))
    assert (tmp_path / FOLDER / "test_batch.bin").read_bytes() == batch_file()
    assert server.requests == []


def test_a_damaged_archive_that_is_there_is_fetched_again(tmp_path, server):
    (tmp_path / FILE).write_bytes(ARCHIVE[:1000])
    ensure_cifar10(tmp_path, base_url=server.url, md5=md5(ARCHIVE))
    assert (tmp_path / FILE).read_bytes() == ARCHIVE
    assert len(server.requests) == 1


def test_files_that_are_there_need_no_network_and_no_right_to_write(tmp_path, server):
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "test_batch.bin").write_bytes(batch_file())
    assert ensure_cifar10(tmp_path, base_url=server.url) == ensure_cifar10(folder) == folder
    assert server.requests == []
    assert left_behind(tmp_path) == [FOLDER]
    assert list(tmp_path.glob(".*")) == []


def test_what_a_killed_run_left_is_swept_away(tmp_path, server):
    partial = tmp_path / f".{FOLDER}.unfinished"
    partial.mkdir()
    (partial / "data_batch_1.bin").write_bytes(b"half")
    (tmp_path / f".{FILE}.unfinished").write_bytes(ARCHIVE[:100])
    folder = ensure_cifar10(tmp_path, base_url=server.url, md5=md5(ARCHIVE))
    assert (folder / "data_batch_1.bin").read_bytes() == batch_file()
    assert left_behind(tmp_path) == [FOLDER, FILE]


def _ensure(data_dir, url, checksum, start, results):
    start.wait()
    results.put(str(ensure_cifar10(data_dir, base_url=url, md5=checksum)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")  # by the server
def test_of_two_processes_one_fetches(tmp_path, server):
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(2), context.Queue()
    arguments = (tmp_path, server.url, md5(ARCHIVE), start, results)
    processes = [context.Process(target=_ensure, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    assert {results.get(timeout=60) for _ in processes} == {str(tmp_path / FOLDER)}
    for process in processes:
        process.join()
    assert len(server.requests) == 1


def test_a_server_that_is_not_there(tmp_path, server):
    with serving(ARCHIVE) as gone:
        pass
    message = refuse(tmp_path, gone, MissingFileError, "Connection refused")
    assert message == (
        f"{gone.url}{FILE}: cannot be fetched (Connection refused), expected {FILE}; check the connection "
        f"and run again, or download {gone.url}{FILE} yourself and unpack it into {tmp_path}"
    )
    # And when it is there again:
    assert ensure_cifar10(tmp_path, base_url=server.url, md5=md5(ARCHIVE)) == tmp_path / FOLDER


@pytest.mark.parametrize("status", [403, 404, 503])
def test_a_server_that_does_not_have_it(tmp_path, server, status):
    server.status = status
    refuse(tmp_path, server, MissingFileError, f"cannot be fetched \\(HTTP status {status}\\)")
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("url", ["nowhere", "ftp://127.0.0.1/", "http://", "http://[::1/"])
def test_an_address_that_is_none(tmp_path, url):
    with pytest.raises(MissingFileError, match="cannot be fetched") as error:
        ensure_cifar10(tmp_path, base_url=url)
    assert str(error.value).startswith(f"{url.rstrip('/')}/{FILE}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_bytes", [0, 1000, len(ARCHIVE) - 1])
def test_a_connection_that_breaks_off(tmp_path, server, num_bytes):
    server.break_off_at = num_bytes
    refuse(tmp_path, server, MissingFileError, "cannot be fetched")
    assert left_behind(tmp_path) == []
    server.break_off_at = None
    assert ensure_cifar10(tmp_path, base_url=server.url, md5=md5(ARCHIVE)) == tmp_path / FOLDER


def test_a_wrong_checksum(tmp_path, server):
    message = refuse(tmp_path, server, DataError, "does not have the MD5 checksum", "0" * 32)
    assert f"yourself and unpack it into {tmp_path}" in message
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("num_bytes", [0, 1, 5, 100, 20_000, len(ARCHIVE) - 30])
def test_a_truncated_archive(tmp_path, num_bytes):
    with serving(ARCHIVE[:num_bytes]) as server:
        message = refuse(tmp_path, server, DataError, "cannot be unpacked|holds no folder")
    assert f"delete it, then download {server.url}{FILE} yourself" in message
    assert left_behind(tmp_path) == [FILE]


def test_an_archive_of_something_else(tmp_path):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.addfile(*entry("other/file", b"content"))
    with serving(packed.getvalue()) as server:
        refuse(tmp_path, server, DataError, f"holds 'other/file', expected only files in the folder {FOLDER}")
    assert left_behind(tmp_path) == [FILE]


HOSTILE = {
    "../../evil": entry("../../evil", b"evil"),
    f"{FOLDER}/../../evil": entry(f"{FOLDER}/../../evil", b"evil"),
    "/tmp/samestep-evil": entry("/tmp/samestep-evil", b"evil"),
    f"{FOLDER}/symlink": entry(f"{FOLDER}/symlink", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    f"{FOLDER}/inside": entry(f"{FOLDER}/inside", type=tarfile.SYMTYPE, linkname="test_batch.bin"),
    f"{FOLDER}/hard": entry(f"{FOLDER}/hard", type=tarfile.LNKTYPE, linkname=f"{FOLDER}/test_batch.bin"),
    f"{FOLDER}/device": entry(f"{FOLDER}/device", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    f"{FOLDER}/..": entry(f"{FOLDER}/..", b"evil"),
    f"{FOLDER}/inner/file": entry(f"{FOLDER}/inner/file", b"evil"),
    f"{FOLDER}/inner": entry(f"{FOLDER}/inner", type=tarfile.DIRTYPE),
    f"{FOLDER}/sparse": entry(f"{FOLDER}/sparse", type=tarfile.GNUTYPE_SPARSE),
    f"{FOLDER}/pipe": entry(f"{FOLDER}/pipe", type=tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive(tmp_path, name):
    data_dir = tmp_path / "a" / "b" / "data"
    info, content = HOSTILE[name]
    content.seek(0)
    with serving(make_archive((info, content))) as server:
        message = refuse(data_dir, server, DataError, "expected only files in the folder")
    assert repr(name) in message
    assert left_behind(data_dir) == [FILE]
    assert [path.name for path in tmp_path.rglob("*evil*")] == []
    assert not os.path.exists("/tmp/samestep-evil")


@contextlib.contextmanager
def files_up_to(num_bytes):
    """Let no write go beyond so many bytes, as a full disk does: the system refuses it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("there", [False, True], ids=["while it is fetched", "while it is unpacked"])
def test_no_room(tmp_path, server, there):
    if there:
        (tmp_path / FILE).write_bytes(ARCHIVE)
    with files_up_to(20_000):
        message = refuse(tmp_path, server, MissingFileError, "cannot be written")
    assert os.strerror(errno.EFBIG) in message
    assert "choose another data folder" in message
    assert left_behind(tmp_path) == ([FILE] if there else [])
    assert ensure_cifar10(tmp_path, base_url=server.url, md5=md5(ARCHIVE)) == tmp_path / FOLDER


def test_a_folder_that_cannot_be_made(tmp_path, server):
    (tmp_path / "file").touch()
    message = refuse(tmp_path / "file" / "data", server, MissingFileError, "cannot be written")
    assert os.strerror(errno.EEXIST) in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_the_right_to_write(tmp_path, server):
    tmp_path.chmod(0o500)
    try:
        refuse(tmp_path, server, MissingFileError, os.strerror(errno.EACCES))
    finally:
        tmp_path.chmod(0o700)


def test_every_refusal_is_one_of_ours():
    assert issubclass(MissingFileError, Error)
    assert issubclass(DataError, Error)


# ---- hostile servers -----------------------------------------------------------------------------------


def body_without_end(handler):
    start_answer(handler)
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(bytes(1 << 16))


def body_without_end_and_a_length(handler):
    start_answer(handler, **{"Content-Length": str(10**15)})
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(bytes(1 << 16))


def packed_body_without_end(handler):
    start_answer(handler, **{"Content-Encoding": "gzip"})
    bomb = gzip.compress(bytes(1 << 22))
    with contextlib.suppress(OSError):
        for _ in range(100):
            handler.wfile.write(bomb)


def start_answer(handler, status=200, **headers):
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()


def trickle(handler, content):
    with contextlib.suppress(OSError):
        for byte in content:
            handler.wfile.write(bytes([byte]))
            if handler.server.is_over.wait(0.02):
                return


def slow_body(handler):
    start_answer(handler, **{"Content-Length": "1000"})
    trickle(handler, bytes(1000))


def slow_headers(handler):
    trickle(handler, b"HTTP/1.0 200 OK\r\n" + b"X-Long: " + b"x" * 1000)


def silence(handler):
    handler.server.is_over.wait(30)


def redirects_without_end(handler):
    start_answer(handler, 302, Location=f"{handler.path}x")


def redirect_to_a_file(handler):
    start_answer(handler, 302, Location="file:///etc/passwd")


def redirect_to_nowhere(handler):
    start_answer(handler, 302, Location="http://")


def redirect_of_odd_bytes(handler):
    handler.wfile.write(b"HTTP/1.0 302 Found\r\nLocation: http://\xff\xfe\r\n\r\n")


def too_long_a_header(handler):
    with contextlib.suppress(OSError):
        handler.wfile.write(b"HTTP/1.0 200 OK\r\nX-Long: " + b"x" * 70_000 + b"\r\n\r\n")


def no_http(handler):
    handler.wfile.write(b"220 ready\r\n")


def an_odd_length(handler):
    start_answer(handler, **{"Content-Length": "-5 or so"})
    handler.wfile.write(ARCHIVE[:1000])


def too_long_a_length(handler):
    start_answer(handler, **{"Content-Length": str(len(ARCHIVE) + 1)})
    handler.wfile.write(ARCHIVE)
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


def too_short_a_length(handler):
    start_answer(handler, **{"Content-Length": "100"})
    handler.wfile.write(ARCHIVE)


UNFIT = {
    body_without_end: (DataError, "sends more than the 1000000 bytes that were expected"),
    body_without_end_and_a_length: (DataError, "sends more than the 1000000 bytes that were expected"),
    packed_body_without_end: (DataError, "sends more than the 1000000 bytes that were expected"),
    slow_body: (MissingFileError, r"has sent \d+ bytes in \d s, expected 10000 a second"),
    slow_headers: (MissingFileError, r"has sent 0 bytes in \d s, expected 10000 a second"),
    silence: (MissingFileError, r"has sent 0 bytes in \d s, expected 10000 a second|\(timed out\)"),
    redirects_without_end: (MissingFileError, "cannot be fetched"),
    redirect_to_a_file: (MissingFileError, "cannot be fetched"),
    redirect_to_nowhere: (MissingFileError, "cannot be fetched"),
    redirect_of_odd_bytes: (MissingFileError, "cannot be fetched"),
    too_long_a_header: (MissingFileError, "cannot be fetched"),
    no_http: (MissingFileError, "cannot be fetched"),
    an_odd_length: (DataError, "does not have the MD5 checksum"),
    too_long_a_length: (MissingFileError, "cannot be fetched"),
    too_short_a_length: (DataError, "does not have the MD5 checksum"),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # requests leaves sockets open
@pytest.mark.parametrize("answer", UNFIT, ids=lambda answer: answer.__name__)
def test_a_server_that_answers_so(tmp_path, server, monkeypatch, answer):
    kind, reported = UNFIT[answer]
    is_slow = answer in (slow_body, slow_headers, silence)
    monkeypatch.setattr(download, "_TIMEOUT_S", 1.0 if is_slow else 30.0)
    server.answer = answer
    archive = download.Archive(f"{server.url}{FILE}", md5(ARCHIVE), FOLDER, max_bytes=1_000_000)
    begin_s = time.monotonic()
    with pytest.raises(kind, match=reported) as caught:
        download.fetch(archive, tmp_path)
    assert time.monotonic() - begin_s < 20
    assert str(caught.value).startswith(f"{server.url}{FILE}: ")
    assert str(caught.value).isprintable()
    assert left_behind(tmp_path) == []
    del caught
    gc.collect()


# ---- hostile archives and folders ----------------------------------------------------------------------


def fetch_here(data_dir, content, max_bytes=1_000_000):
    """Unpack an archive that is there; nobody is asked for another."""
    (data_dir / FILE).write_bytes(content)
    archive = download.Archive(f"http://127.0.0.1:1/{FILE}", md5(content), FOLDER, max_bytes)
    return download.fetch(archive, data_dir)


def pax_bomb():
    """A header that says that it is 2 MB long, and is."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(*entry(f"{FOLDER}/file", pax_headers={"comment": "x" * 2_000_000}))
    return packed.getvalue()


LARGE = {
    "a large file": lambda: make_archive(entry(f"{FOLDER}/large", bytes(2_000_000))),
    "a large header": pax_bomb,
    "many files": lambda: make_archive(*(entry(f"{FOLDER}/{n}") for n in range(101))),
}


@pytest.mark.parametrize("kind", LARGE)
def test_an_archive_that_unpacks_to_too_much(tmp_path, kind):
    with pytest.raises(DataError, match=r"(unpacks to|holds) more than (the )?(1000000 bytes|100 files)"):
        fetch_here(tmp_path, LARGE[kind]())
    assert left_behind(tmp_path) == [FILE]


def test_damage_inside_an_archive_is_never_another_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    content = gzip.decompress(make_archive(entry(f"{FOLDER}/more", b"more")))
    generator = random.Random(0)
    step = 512 + -(-NUM * 3073 // 512) * 512  # from one member's header to the next one's
    for number in range(80):
        damaged = bytearray(content)
        for _ in range(generator.choice((1, 1, 5))):
            at = generator.randrange(7) * step + generator.randrange(512)
            damaged[at] = generator.choice((0, 0xFF, 0x2F, 0x37, 0x53, 0x78, generator.randrange(256)))
        reseal_headers(damaged, step)
        data_dir = tmp_path / str(number)
        data_dir.mkdir()
        with contextlib.suppress(DataError):
            assert fetch_here(data_dir, gzip.compress(damaged, 1)) == data_dir / FOLDER
        assert set(left_behind(data_dir)) <= {FOLDER, FILE}
        shutil.rmtree(data_dir)


def reseal_headers(content, step):
    """Make the checksums of a tar file's headers right again."""
    for at in range(0, 7 * step, step):
        content[at + 148 : at + 156] = b" " * 8
        content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])


def test_what_an_archive_says_of_modes_and_times_is_left_out(tmp_path):
    odd = entry(f"{FOLDER}/odd", b"content", mode=0o4777, mtime=2**62, uid=12345, uname="someone")
    assert fetch_here(tmp_path, make_archive(odd)) == tmp_path / FOLDER
    assert {(path.stat().st_mode & 0o7000, path.stat().st_uid) for path in (tmp_path / FOLDER).iterdir()} == {
        (0, os.geteuid())
    }


def endless(path):
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, endless], ids=lambda plant: plant.__name__)
def test_something_else_in_place_of_the_archive(tmp_path, server, plant):
    plant(tmp_path / FILE)
    with pytest.raises(DataError, match=f"{FILE}: is not a regular file, expected an archive: remove it"):
        ensure_cifar10(tmp_path, base_url=server.url, md5=md5(ARCHIVE))
    assert server.requests == []


def test_an_archive_elsewhere_may_be_linked(tmp_path, server):
    (tmp_path / "elsewhere").write_bytes(ARCHIVE)
    (tmp_path / FILE).symlink_to(tmp_path / "elsewhere")
    ensure_cifar10(tmp_path, base_url=server.url, md5=md5(ARCHIVE))
    assert server.requests == []


def test_a_huge_file_in_place_of_the_archive_is_not_read(tmp_path, server):
    with (tmp_path / FILE).open("wb") as file:
        file.truncate(2**40)
    ensure_cifar10(tmp_path, base_url=server.url, md5=md5(ARCHIVE))
    assert (tmp_path / FILE).read_bytes() == ARCHIVE


@pytest.mark.parametrize("name", [f".{FILE}.unfinished", f".{FILE}.lock", FILE])
@pytest.mark.parametrize("kind", ["link", "second name"])
def test_what_a_link_leads_to_is_never_written_to(tmp_path, server, name, kind):
    data_dir, precious = tmp_path / "data", tmp_path / "precious"
    data_dir.mkdir()
    precious.write_text("mine")
    plant = (data_dir / name).symlink_to if kind == "link" else (data_dir / name).hardlink_to
    plant(precious)
    if name.endswith("lock"):
        with pytest.raises(MissingFileError, match=name):
            ensure_cifar10(data_dir, base_url=server.url, md5=md5(ARCHIVE))
    else:
        ensure_cifar10(data_dir, base_url=server.url, md5=md5(ARCHIVE))
        assert left_behind(data_dir) == [FOLDER, FILE]
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir], ids=lambda plant: plant.__name__)
def test_a_lock_that_is_none(tmp_path, server, plant):
    plant(tmp_path / f".{FILE}.lock")
    with pytest.raises(MissingFileError, match=f".{FILE}.lock"):
        ensure_cifar10(tmp_path, base_url=server.url, md5=md5(ARCHIVE))


def test_who_waits_for_another_process_says_so(tmp_path, server, monkeypatch, capsys):
    monkeypatch.setattr(download, "_TIMEOUT_S", 0.2)
    with Folder.open(tmp_path) as data:
        lock = FileLock(data, f".{FILE}.lock")
        assert lock.acquire(0)
        releasing = threading.Timer(1.0, lock.release)
        releasing.start()
        monkeypatch.setattr("requests.get", None)
        (tmp_path / FILE).write_bytes(ARCHIVE)
        ensure_cifar10(tmp_path, base_url=server.url, md5=md5(ARCHIVE))
        releasing.join()
    assert (
        capsys.readouterr().err == f"samestep: {tmp_path}: waiting for another process that fetches there\n"
    )
