import contextlib
import errno
import hashlib
import http.server
import io
import multiprocessing
import os
import resource
import socket
import tarfile
import threading

import numpy as np
import pytest

from samestep.errors import DataError, Error, MissingFileError
from samestep.recipes.cifar10.data import Cifar10, ensure_cifar10

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
        self.url = f"http://127.0.0.1:{self.server_address[1]}/data/"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
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
    partial = tmp_path / f".{FOLDER}.partial"
    (partial / FOLDER).mkdir(parents=True)
    (partial / FOLDER / "data_batch_1.bin").write_bytes(b"half")
    folder = ensure_cifar10(tmp_path, base_url=server.url, md5=md5(ARCHIVE))
    assert (folder / "data_batch_1.bin").read_bytes() == batch_file()
    assert not partial.exists()


def _ensure(data_dir, url, checksum, start, results):
    start.wait()
    results.put(str(ensure_cifar10(data_dir, base_url=url, md5=checksum)))


def test_of_two_processes_one_fetches(tmp_path, server):
    context = multiprocessing.get_context("spawn")
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
        refuse(tmp_path, server, DataError, f"holds no folder {FOLDER}")
    assert left_behind(tmp_path) == [FILE]


HOSTILE = {
    "../../evil": entry("../../evil", b"evil"),
    f"{FOLDER}/../../evil": entry(f"{FOLDER}/../../evil", b"evil"),
    "/tmp/samestep-evil": entry("/tmp/samestep-evil", b"evil"),
    f"{FOLDER}/symlink": entry(f"{FOLDER}/symlink", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    f"{FOLDER}/inside": entry(f"{FOLDER}/inside", type=tarfile.SYMTYPE, linkname="test_batch.bin"),
    f"{FOLDER}/hard": entry(f"{FOLDER}/hard", type=tarfile.LNKTYPE, linkname=f"{FOLDER}/test_batch.bin"),
    f"{FOLDER}/device": entry(f"{FOLDER}/device", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
    f"{FOLDER}/pipe": entry(f"{FOLDER}/pipe", type=tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive(tmp_path, name):
    data_dir = tmp_path / "a" / "b" / "data"
    info, content = HOSTILE[name]
    content.seek(0)
    with serving(make_archive((info, content))) as server:
        message = refuse(data_dir, server, DataError, "expected only files and folders inside its own folder")
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
    assert os.strerror(errno.ENOTDIR) in message


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
