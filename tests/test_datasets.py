"""Data sets: what is loaded, and every way in which a file or a download can be wrong."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sklearn.datasets import load_digits

from equipoise.data import cifar100, datasets
from equipoise.data.augment import Crop
from equipoise.data.images import Images
from equipoise.errors import DataError, UsageError

torch.set_num_threads(1)

CIFAR100 = Path(__file__).parents[2] / "shared/data/cifar100"
RECORDS = (40, 10)  # enough that the archive is longer than what a download reads at a time
BINARY, PYTHON = "cifar-100-binary", "cifar-100-python"
Bytes = npt.NDArray[np.uint8]


# Digits


def test_digits_are_the_first_140_of_each_class_and_the_rest() -> None:
    bunch = load_digits()
    seen = [0] * 10
    train: list[int] = []
    test: list[int] = []
    for i, label in enumerate(bunch.target):
        (train if seen[label] < 140 else test).append(i)
        seen[label] += 1
    digits = datasets.load("digits")
    for images, which in ((digits.train, train), (digits.test, test)):
        assert images.x.shape == (len(which), 1, 8, 8) and images.x.dtype == torch.uint8
        assert images.y.dtype == torch.int64
        np.testing.assert_array_equal(images.x[:, 0].numpy(), bunch.images[which] * 15)
        np.testing.assert_array_equal(images.y.numpy(), bunch.target[which])
    assert digits.train.y.bincount().tolist() == [140] * 10
    assert len(digits.train) + len(digits.test) == len(bunch.target)
    assert digits.train.x.max() == 240


def test_digits_are_found_by_scikit_learn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = datasets.load("digits")
    monkeypatch.setattr(datasets, "_read_digits", datasets._read_digits.__wrapped__)  # not as in tests, once
    monkeypatch.setattr(datasets.importlib.util, "find_spec", lambda name: SimpleNamespace(origin="/elsewhere/x.py"))
    found = datasets.load("digits")
    assert torch.equal(found.train.x, expected.train.x) and torch.equal(found.test.y, expected.test.y)


def test_digits_statistics_are_those_of_the_training_images() -> None:
    digits = datasets.load("digits")
    grey = digits.train.x.numpy().astype(np.float64) / 255
    assert digits.mean == pytest.approx((grey.mean(),), abs=1e-12)
    assert digits.std == pytest.approx((np.sqrt(((grey - grey.mean()) ** 2).mean()),), abs=1e-12)


def test_digits_describe_themselves() -> None:
    digits = datasets.load("digits")
    assert digits.name == "digits"
    assert digits.classes == tuple(str(i) for i in range(10))
    assert digits.augment == Crop(pad=1, flip=False)


def test_fingerprint_tells_data_apart(folder: Path) -> None:
    write(folder, BINARY)
    cifar = datasets.load("cifar100")
    assert cifar.fingerprint == datasets.load("cifar100").fingerprint != datasets.load("digits").fingerprint
    other = Images(cifar.test.x, cifar.test.y.flip(0))
    assert datasets._fingerprint(cifar.train, other) != cifar.fingerprint
    assert datasets._fingerprint(cifar.test, cifar.train) != cifar.fingerprint


@pytest.mark.parametrize(("wrong", "right"), [("cifar10", "cifar100"), ("digit", "digits"), ("CIFAR100", "cifar100")])
def test_unknown_name_suggests_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(UsageError, match=f"unknown data set '{wrong}': did you mean '{right}'"):
        datasets.load(wrong)


# Synthetic files in the official forms, whose checksums are declared to be the published ones


def records(n: int, seed: int = 0) -> Bytes:
    table = np.random.default_rng(seed).integers(0, 256, (n, 3074), np.uint8)
    table[:, 0] %= 20
    table[:, 1] %= 100
    return table


def pickled(table: Bytes) -> bytes:
    """The pickle as Python 2 wrote it, opcode by opcode: the Python of today writes another."""

    def text(s: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(s)) + s

    def integer(i: int) -> bytes:
        return b"J" + struct.pack("<i", i)

    def numbers(column: Bytes) -> bytes:
        return b"](" + b"".join(integer(int(i)) for i in column) + b"e"

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + integer(0) + integer(1) + b"\x87R"
    dtype += b"(" + integer(3) + text(b"|") + b"NNN" + integer(-1) + integer(-1) + integer(0) + b"tb"
    shape = integer(len(table)) + integer(3072) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + integer(0) + b"\x85" + text(b"b") + b"\x87R"
    array += b"(" + integer(1) + shape + dtype + b"\x89" + text(table[:, 2:].tobytes()) + b"tb"
    items = text(b"data") + array
    items += text(b"coarse_labels") + numbers(table[:, 0]) + text(b"fine_labels") + numbers(table[:, 1])
    return b"\x80\x02}(" + items + b"u."


def tar(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as out:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
    return file.getvalue()


TRAIN, TEST = records(RECORDS[0], 1), records(RECORDS[1], 2)
FILES = {
    f"{BINARY}/train.bin": TRAIN.tobytes(),
    f"{BINARY}/test.bin": TEST.tobytes(),
    f"{PYTHON}/train": pickled(TRAIN),
    f"{PYTHON}/test": pickled(TEST),
}
ARCHIVES = {
    form: tar({name: data for name, data in FILES.items() if name.startswith(form)}) for form in (BINARY, PYTHON)
}


def declare(patch: pytest.MonkeyPatch, name: str, data: bytes) -> None:
    patch.setitem(cifar100.MD5, name, hashlib.md5(data).hexdigest())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty default folder, the small files declared to be the official ones, and no network."""
    monkeypatch.setattr(cifar100, "RECORDS", RECORDS)
    for name, data in FILES.items():
        declare(monkeypatch, name.split("/")[1], data)
    for form, data in ARCHIVES.items():
        declare(monkeypatch, f"{form}.tar.gz", data)
    with socket.socket() as s:  # a port that was free a moment ago: nothing listens there
        s.bind(("127.0.0.1", 0))
        monkeypatch.setattr(cifar100, "URL", f"http://127.0.0.1:{s.getsockname()[1]}/{BINARY}.tar.gz")
    monkeypatch.setenv("no_proxy", "*")
    path = tmp_path / "data"
    path.mkdir()
    monkeypatch.setenv("EQUIPOISE_DATA", str(path))
    return path


def write(place: Path, form: str, direct: bool = False) -> None:
    for name, data in FILES.items():
        if name.startswith(form):
            path = place / (name.split("/")[1] if direct else name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)


def check_content(cifar: datasets.Dataset) -> None:
    for images, table in ((cifar.train, TRAIN), (cifar.test, TEST)):
        assert images.x.dtype == torch.uint8 and images.y.dtype == torch.int64
        np.testing.assert_array_equal(images.x.numpy(), table[:, 2:].reshape(-1, 3, 32, 32))
        np.testing.assert_array_equal(images.y.numpy(), table[:, 1])


# Files that are there


def test_a_pixel_goes_to_its_channel_row_and_column(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = np.zeros((RECORDS[0], 3074), np.uint8)
    table[3, :2] = 19, 99
    table[3, 2 + 2 * 1024 + 5 * 32 + 7] = 200  # blue, row 5, column 7
    table[4, 2 + 0 * 1024 + 31 * 32 + 0] = 100  # red, bottom left
    write(folder, BINARY)
    (folder / BINARY / "train.bin").write_bytes(table.tobytes())
    declare(monkeypatch, "train.bin", table.tobytes())
    train = datasets.load("cifar100").train
    assert train.x.nonzero().tolist() == [[3, 2, 5, 7], [4, 0, 31, 0]]
    assert train.x[3, 2, 5, 7] == 200 and train.x[4, 0, 31, 0] == 100
    assert train.y.nonzero().tolist() == [[3]] and train.y[3] == 99


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("form", [BINARY, PYTHON])
def test_official_files_are_read(folder: Path, form: str, direct: bool) -> None:
    write(folder, form, direct)
    cifar = datasets.load("cifar100")
    check_content(cifar)
    assert (cifar.name, cifar.augment) == ("cifar100", Crop(pad=4, flip=True))
    assert cifar.mean == (0.5071, 0.4866, 0.4409) and cifar.std == (0.2673, 0.2564, 0.2762)
    assert len(list(folder.iterdir())) == (2 if direct else 1)  # reading leaves nothing behind


def test_folder_given_goes_before_the_default_one(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write(other, BINARY)
    check_content(datasets.load("cifar100", folder=other))
    assert not list(folder.iterdir())


def test_binary_form_goes_before_the_python_form(folder: Path) -> None:
    write(folder, PYTHON)
    write(folder, BINARY, direct=True)
    (folder / PYTHON / "train").write_bytes(b"never read")
    check_content(datasets.load("cifar100"))


def test_hundred_names_in_alphabetical_order() -> None:
    names = cifar100.CLASSES
    assert len(set(names)) == 100 and list(names) == sorted(names)
    assert (names[0], names[47], names[99]) == ("apple", "maple_tree", "worm")


@pytest.mark.parametrize(("cut", "found"), [(-1, 40 * 3074 - 1), (0, 0)])
def test_truncated_file_says_both_sizes(folder: Path, cut: int, found: int) -> None:
    write(folder, BINARY)
    path = folder / BINARY / "train.bin"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError) as e:
        datasets.load("cifar100")
    assert f"{path} has {found} bytes where {40 * 3074} are expected" in str(e.value)
    assert "delete it" in str(e.value) and cifar100.PAGE in str(e.value)


@pytest.mark.parametrize("name", sorted(FILES))
def test_one_changed_bit_is_found(folder: Path, name: str) -> None:
    write(folder, name.split("/")[0])
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(DataError) as e:
        datasets.load("cifar100")
    expected = hashlib.md5(FILES[name]).hexdigest()
    assert f"{folder / name} has md5 {hashlib.md5(data).hexdigest()} where {expected} is expected" in str(e.value)
    assert "delete it" in str(e.value) and cifar100.PAGE in str(e.value)


@pytest.mark.parametrize("form", [BINARY, PYTHON])
def test_label_outside_the_classes(folder: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, form)
    table = TEST.copy()
    table[7, 1] = 100
    path, data = {
        BINARY: (folder / BINARY / "test.bin", table.tobytes()),
        PYTHON: (folder / PYTHON / "test", pickled(table)),
    }[form]
    path.write_bytes(data)
    declare(monkeypatch, path.name, data)
    with pytest.raises(DataError, match="to 100, outside 0 to 99") as e:
        datasets.load("cifar100")
    assert str(path) in str(e.value)


# Pickles that are not what they say


class Evil:
    """Unpickling it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("declared", [False, True])
def test_malicious_pickle_does_not_run(
    folder: Path, tmp_path: Path, declared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    evil = pickle.dumps({b"data": Evil(mark), b"fine_labels": []}, protocol=4)
    pickle.loads(evil)
    assert mark.is_dir()  # it works where nobody takes care
    mark.rmdir()
    write(folder, PYTHON)
    (folder / PYTHON / "train").write_bytes(evil)
    if declared:
        declare(monkeypatch, "train", evil)
    else:  # not even the careful unpickler may see a file of the wrong checksum
        monkeypatch.setattr(cifar100, "_unpickle", lambda *_: pytest.fail("unpickled before it was checked"))
    with pytest.raises(DataError, match=r"it contains \w+\.mkdir" if declared else "has md5"):
        datasets.load("cifar100")
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": b"bytes", b"fine_labels": [1]}),
        pickled(TRAIN[:-1]),
        pickled(TRAIN)[:-1],
    ],
)
def test_pickle_of_something_else(folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, PYTHON)
    path = folder / PYTHON / "train"
    path.write_bytes(content)
    declare(monkeypatch, "train", content)
    with pytest.raises(DataError) as e:
        datasets.load("cifar100")
    assert str(path) in str(e.value) and cifar100.PAGE in str(e.value)


# Archives


@pytest.mark.parametrize("form", [BINARY, PYTHON])
def test_archive_is_unpacked_next_to_itself(folder: Path, form: str) -> None:
    archive = folder / f"{form}.tar.gz"
    archive.write_bytes(ARCHIVES[form])
    check_content(datasets.load("cifar100"))
    unpacked = {str(p.relative_to(folder)): p.read_bytes() for p in (folder / form).iterdir()}
    assert unpacked == {name: data for name, data in FILES.items() if name.startswith(form)}
    archive.unlink()
    check_content(datasets.load("cifar100"))


def test_half_unpacked_archive_is_unpacked_again(folder: Path) -> None:
    (folder / f"{BINARY}.tar.gz").write_bytes(ARCHIVES[BINARY])
    (folder / BINARY).mkdir()
    (folder / BINARY / "train.bin").write_bytes(b"")
    (folder / BINARY / "test.bin.part").write_bytes(b"left over")
    check_content(datasets.load("cifar100"))


def test_corrupt_archive_is_not_unpacked(folder: Path) -> None:
    archive = folder / f"{BINARY}.tar.gz"
    archive.write_bytes(ARCHIVES[BINARY][:-1])
    with pytest.raises(DataError) as e:
        datasets.load("cifar100")
    assert str(archive) in str(e.value) and "md5" in str(e.value) and "delete it" in str(e.value)
    assert not (folder / BINARY).exists()


def test_archive_cannot_write_elsewhere(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = {
        "../evil": b"x",
        f"{BINARY}/../../evil": b"x",
        str(tmp_path / "evil"): b"x",
        f"{BINARY}/more": b"x",
    }
    data = tar(evil | {name: data for name, data in FILES.items() if name.startswith(BINARY)})
    (folder / f"{BINARY}.tar.gz").write_bytes(data)
    declare(monkeypatch, f"{BINARY}.tar.gz", data)
    check_content(datasets.load("cifar100"))
    assert not list(tmp_path.rglob("evil"))
    assert {p.name for p in (folder / BINARY).iterdir()} == {"train.bin", "test.bin"}


def test_archive_without_its_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as out:
        link = tarfile.TarInfo(f"{BINARY}/train.bin")  # the right name, but a link out of the folder
        link.type, link.linkname = tarfile.SYMTYPE, "../../elsewhere"
        out.addfile(link)
    (folder / f"{BINARY}.tar.gz").write_bytes(file.getvalue())
    declare(monkeypatch, f"{BINARY}.tar.gz", file.getvalue())
    with pytest.raises(DataError, match=rf"does not hold the file {BINARY}/train\.bin"):
        datasets.load("cifar100")


# Downloads, from a real server on this machine


class Server(ThreadingHTTPServer):
    """Sends `content`; counts its requests."""

    daemon_threads = True
    content = ARCHIVES[BINARY]
    breaks_after: int | None = None
    status: int | None = None
    waits = 0.0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = 0
        self.is_over = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        server.requests += 1
        server.is_over.wait(server.waits)
        if server.status:
            self.send_error(server.status)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(server.content)))
        self.end_headers()
        self.wfile.write(server.content[: server.breaks_after])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(cifar100, "URL", f"http://127.0.0.1:{server.server_port}/{BINARY}.tar.gz")
        yield server
        server.is_over.set()
        server.shutdown()
        thread.join()


def test_download(folder: Path, server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    check_content(datasets.load("cifar100", progress=False))
    assert (folder / f"{BINARY}.tar.gz").read_bytes() == ARCHIVES[BINARY]
    assert capfd.readouterr() == ("", "")
    check_content(datasets.load("cifar100"))
    assert server.requests == 1  # the second time nothing was asked for


def test_progress_is_shown_on_stderr(folder: Path, server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    datasets.load("cifar100")
    out, err = capfd.readouterr()
    assert out == "" and "CIFAR-100" in err


def test_download_into_a_folder_given(server: Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    check_content(datasets.load("cifar100", folder=other, progress=False))
    assert (other / f"{BINARY}.tar.gz").exists()


def test_broken_download_leaves_nothing(folder: Path, server: Server) -> None:
    server.breaks_after = 100_000
    with pytest.raises(DataError, match=r"sent 100000 bytes with md5 .* they were discarded: run again"):
        datasets.load("cifar100", progress=False)
    assert not list(folder.glob("*cifar-100*"))
    server.breaks_after = None
    check_content(datasets.load("cifar100", progress=False))


def test_what_a_killed_download_has_left_is_not_taken_for_the_archive(folder: Path, server: Server) -> None:
    left = folder / f"{BINARY}.tar.gz.received.0123abcd.partial"
    folder.mkdir(exist_ok=True)
    left.write_bytes(ARCHIVES[BINARY][:1000])
    check_content(datasets.load("cifar100", progress=False))
    assert server.requests == 1 and not left.exists()


def test_wrong_checksum_is_not_kept(folder: Path, server: Server) -> None:
    server.content = ARCHIVES[BINARY][:-1] + b"x"
    with pytest.raises(DataError, match=r"md5 .* is expected; they were discarded: run again"):
        datasets.load("cifar100", progress=False)
    assert not list(folder.glob("*cifar-100*"))
    server.content = ARCHIVES[BINARY]
    check_content(datasets.load("cifar100", progress=False))


@pytest.mark.parametrize("status", [404, 503])
def test_server_that_refuses(folder: Path, server: Server, status: int) -> None:
    server.status = status
    with pytest.raises(DataError, match=f"HTTP Error {status}"):
        datasets.load("cifar100", progress=False)


def test_server_that_says_nothing(folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.waits = 30.0
    monkeypatch.setattr(cifar100, "TIMEOUT", 0.2)
    with pytest.raises(DataError, match="timed out"):
        datasets.load("cifar100", progress=False)


def test_two_runs_download_once(folder: Path, server: Server) -> None:
    server.waits = 0.2  # so that the second comes while the first is waiting
    with ThreadPoolExecutor(2) as pool:
        for cifar in pool.map(lambda _: datasets.load("cifar100", progress=False), range(2)):
            check_content(cifar)
    assert server.requests == 1


def test_full_disk_is_not_called_a_network_error(folder: Path, server: Server, monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "move", full)  # the last of what torch's downloader does
    with pytest.raises(OSError) as e:
        datasets.load("cifar100", progress=False)
    assert e.value.errno == errno.ENOSPC and not list(folder.glob("*cifar-100*"))


def test_without_network_one_sentence_says_what_to_put_where(folder: Path) -> None:
    with pytest.raises(DataError) as e:
        datasets.load("cifar100", progress=False)
    said = str(e.value)
    assert f"put {BINARY}.tar.gz or {PYTHON}.tar.gz, from {cifar100.PAGE}, into {folder}" in said
    assert "--data DIR" in said and "refused" in said and cifar100.URL in said
    assert "\n" not in said


def test_default_folder_is_in_the_home_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EQUIPOISE_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError) as e:
        datasets.load("cifar100", progress=False)
    assert f"into {tmp_path / '.cache/equipoise/data'}," in str(e.value)


def test_folder_given_must_exist(folder: Path, server: Server, tmp_path: Path) -> None:
    missing = tmp_path / "mising"
    with pytest.raises(DataError, match="is not a folder") as e:
        datasets.load("cifar100", folder=missing, progress=False)
    assert f"--data {missing}" in str(e.value)
    assert server.requests == 0 and not missing.exists()


# The real thing


@pytest.mark.skipif(not CIFAR100.is_dir(), reason="the copy of CIFAR-100 for development is not here")
def test_real_cifar100(tmp_path: Path) -> None:
    subprocess.run([sys.executable, CIFAR100 / "unpack.py", tmp_path], check=True, capture_output=True)
    cifar = datasets.load("cifar100", folder=tmp_path)
    assert cifar.train.x.shape == (50_000, 3, 32, 32) and cifar.test.x.shape == (10_000, 3, 32, 32)
    assert cifar.train.y.bincount().tolist() == [500] * 100
    assert cifar.test.y.bincount().tolist() == [100] * 100
    assert cifar.classes == tuple((tmp_path / BINARY / "fine_label_names.txt").read_text().split())
    level = torch.arange(256, dtype=torch.float64) / 255
    for channel in range(3):
        share = cifar.train.x[:, channel].flatten().bincount(minlength=256).double() / (50_000 * 1024)
        mean = (share * level).sum()
        std = (share * (level - mean) ** 2).sum().sqrt()
        assert mean.item() == pytest.approx((0.5071, 0.4866, 0.4409)[channel], abs=1e-3)
        assert std.item() == pytest.approx((0.2673, 0.2564, 0.2762)[channel], abs=1e-3)
        assert mean.item() == pytest.approx(cifar.mean[channel], abs=1e-3)
        assert std.item() == pytest.approx(cifar.std[channel], abs=1e-3)
