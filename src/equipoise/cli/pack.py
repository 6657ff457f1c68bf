"""`equipoise pack`: the images of a folder, decoded once."""

from __future__ import annotations

from ..data.index import REPORT, read_info
from ..data.listing import list_folder
from ..data.packing import choose_packing, find_packed, pack, show_progress
from ..errors import format_count
from .arguments import Pack


def do_pack(f: Pack) -> None:
    """Decode the images of a folder once, and say what there is in it."""
    listing = list_folder(f.dir, "imagenet-subset" if f.subset else "folder", f.subset)
    packing = choose_packing(listing, f.size, f.short_side, f.square)
    folder = f.out or find_packed(listing, packing, f.subset)
    with show_progress(listing) as tell:
        pack(listing, folder, packing, f.workers, tell)
    info = read_info(folder)
    train, test = (format_count(info["images"][part], "image") for part in ("train", "test"))
    stored = sum(info["shards"]) / 1e9
    print(
        f"{format_count(len(info['classes']), 'class', 'classes')}: {train} for training, {test} for testing, "
        f"{stored:.3g} GB in {folder} ({info['split']})"
    )
    if count := info["left_out"]:
        print(f"{format_count(count, 'image')} left out, which cannot be decoded: see {folder / REPORT}")
