"""Reading what is packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import make_image, make_tree, write

from equipoise.data import packing, shards
from equipoise.data.listing import list_folder
from equipoise.data.packing import Packing, pack
from equipoise.data.ragged import Ragged
from equipoise.data.shards import Shards, open_shards
from equipoise.errors import DataError


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shards:
    """Images of different sizes, seven in a shard."""
    root = make_tree(tmp_path / "data", train=5, width=90, height=70)
    for k in range(9):
        write(root / "train/class1" / f"{k}.png", make_image(k, 100 + 30 * k, 120))
    monkeypatch.setattr(packing, "IMAGES", 7)
    pack(list_folder(root), tmp_path / "packed", Packing(84))
    return open_shards(tmp_path / "packed")


def take(x: Ragged, k: int) -> Any:
    """The pixels of an image."""
    (h, w), begin = x.size[k].tolist(), int(x.start[k])
    return x.pixels[begin : begin + 3 * h * w].view(h, w, 3).numpy()


def expect(folder: Shards, row: int) -> Any:
    """The same from the file."""
    c = {name: int(column[row]) for name, column in folder.index.columns.items()}
    data = (folder.folder / f"shard-{c['shard']:05}.u8").read_bytes()[c["offset"] :]
    return np.frombuffer(data, np.uint8, 3 * c["height"] * c["width"]).reshape(c["height"], c["width"], 3)


@pytest.mark.parametrize("chunk", [1, 30_000, 2**26])
@pytest.mark.parametrize("preadv", [True, False])
def test_any_images_are_read_in_any_order(packed: Shards, monkeypatch: Any, chunk: int, preadv: bool) -> None:
    monkeypatch.setattr(shards, "CHUNK", chunk)
    if not preadv:
        monkeypatch.delattr(shards.os, "preadv")
    count = len(packed)
    for which in ([*range(count)], [*reversed(range(count))], [3, 3, 20, 21, 22, 0], [5], []):
        found = packed.read(which, checked=True)
        assert len(found) == len(which) and found.size.shape == (len(which), 2)
        for k, row in enumerate(which):
            np.testing.assert_array_equal(take(found, k), expect(packed, row))


def test_images_are_read_into_memory_that_is_there(packed: Shards) -> None:
    ring = torch.zeros(2**20, dtype=torch.uint8)
    found = packed.read([4, 2], into=ring)
    assert found.pixels.data_ptr() == ring.data_ptr()
    np.testing.assert_array_equal(take(found, 1), expect(packed, 2))


def test_images_are_read_onto_a_device_some_at_a_time(packed: Shards, monkeypatch: Any) -> None:
    """The same path as to a GPU, on one that is none."""
    monkeypatch.setattr(shards, "CHUNK", 10_000)
    where = np.arange(len(packed))[::-1].copy()
    found, straight = packed.read_onto(where, "meta"), packed.read_onto(where, "cpu")
    assert found.pixels.shape == straight.pixels.shape and found.size.shape == straight.size.shape
    np.testing.assert_array_equal(take(straight, 0), expect(packed, len(packed) - 1))


def test_pixels_that_changed_are_noticed(packed: Shards) -> None:
    path = packed.folder / "shard-00001.u8"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    open_shards(packed.folder)  # of the same length
    packed.read([*range(7)], checked=True)
    with pytest.raises(DataError, match=r"shard-00001.u8 is damaged: delete the folder .* and pack again"):
        packed.read([*range(14)], checked=True)
    path.write_bytes(data[:50])
    with pytest.raises(DataError, match=r"shard-00001.u8 cannot be read \(the file is too short\)"):
        packed.read([7])
