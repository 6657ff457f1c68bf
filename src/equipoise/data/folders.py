"""Data sets from folders of images: any folder of class folders, ImageNet, ImageNet-Subset and mini-ImageNet."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from ..errors import DataError, UsageError, format_count
from .images import Images, summarise_levels
from .index import PACK, Index, Numbers, read_info
from .listing import DEFAULT_SUBSET, Listing, choose_classes, list_folder
from .packing import LARGE, SMALL, Packing, check_same, choose_packing, pack, sample_sizes, show_progress
from .shards import Shards, open_shards
from .stored import Stored

SIZES = {"imagenet": LARGE, "imagenet-subset": LARGE, "mini-imagenet": 84}
"""the size of the images of data sets that are the same everywhere, unless one is chosen"""
NAMES = ("folder", "imagenet", "imagenet-subset", "mini-imagenet")
"""the data sets that are folders of images, given by --data"""
MINI_IMAGES = (200, 50)
"""training and test images of each class of mini-ImageNet, which has 600 in all, of which others take other parts"""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""mean and standard deviation of ImageNet's channels, as all of the field has them"""
PLACES = ("device", "disk")
"""where images are while a net is trained on them"""
ROOM = 2**36
"""bytes of images that are on the device unless one chooses: ImageNet-Subset's are, 34 GB, and ImageNet's are not"""


@dataclass(frozen=True)
class Folder:
    """The images of a folder, as they are packed."""

    train: Images
    test: Images
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    """of an image as a net sees it"""
    mean: tuple[float, ...]
    """mean of each channel of the training images, for pixels from 0 to 1"""
    std: tuple[float, ...]
    fingerprint: str
    """a hash of classes, labels, sizes and pixels, by the checksums of the index"""


def read_folder(
    name: str, root: Path | None, size: int | None, subset: str | None, images_on: str | None, progress: bool
) -> Folder:
    """The images of a data set; what is not packed is packed first, which `progress` shows.

    Those that are to stay on the disk, or are more than ROOM where nothing is chosen, are not read.
    """
    packed = find_or_pack(name, root, size, subset, progress)
    shards = open_shards(packed)
    index = shards.index
    classes = index.classes
    if name != "folder":
        classes = choose_classes(classes, packed, name, subset)
    shape = find_packed_shape(packed, index.info["packing"], size, index)
    position = np.full(len(index.classes), -1)
    position[[index.classes.index(one) for one in classes]] = np.arange(len(classes))
    label = position[index.columns["label"]]
    parts = [np.flatnonzero((label >= 0) & (index.columns["test"] == test)) for test in (0, 1)]
    if name == "mini-imagenet":
        check_mini_imagenet(packed, *(label[which] for which in parts))
    on_disk = find_place(shards, np.concatenate(parts), shape, images_on) == "disk"
    open_part = open_images if on_disk else read_images
    train, test = (open_part(shards, which, label[which], shape) for which in parts)
    mean, std = IMAGENET
    if name == "folder":
        levels = torch.tensor(index.info["levels"], dtype=torch.float64).view(3, 256)
        mean, std = (tuple((value / 255).tolist()) for value in summarise_levels(levels))
    prints = [index.fingerprint(which, label[which]) for which in parts]
    fingerprint = hashlib.sha256(json.dumps([classes, *prints]).encode()).hexdigest()
    return Folder(train, test, classes, shape, mean, std, fingerprint)


def check_mini_imagenet(packed: Path, *labels: Numbers) -> None:
    """Refuse another part of mini-ImageNet than the one that records by this name are of."""
    if any((np.bincount(own) != count).any() for own, count in zip(labels, MINI_IMAGES)):
        train, test = MINI_IMAGES
        raise DataError(
            f"{packed} is not the mini-ImageNet that has {train} training and {test} test images of each class: "
            "use --dataset folder"
        )


def read_images(shards: Shards, which: Numbers, label: Numbers, shape: tuple[int, int, int]) -> Images:
    """The images at these positions: small ones of one size as a tensor, others in their sizes."""
    x, y = shards.read(which, checked=True), torch.from_numpy(label)
    _, height, width = shape
    if max(height, width) > SMALL:
        return Images(x.see(height), y)
    return Images(x.pixels.view(-1, height, width, 3).permute(0, 3, 1, 2).contiguous(), y)


def find_place(shards: Shards, which: Numbers, shape: tuple[int, int, int], images_on: str | None) -> str:
    """Where these images are to be; small ones are always on the device."""
    if max(shape[1:]) <= SMALL:
        if images_on == "disk":
            raise UsageError(f"images of up to {SMALL} pixels are not read while training: remove --images-on disk")
        return "device"
    columns = shards.index.columns
    count = int(3 * (columns["height"][which] * columns["width"][which]).sum())
    return images_on or ("disk" if count > ROOM else "device")


def open_images(shards: Shards, which: Numbers, label: Numbers, shape: tuple[int, int, int]) -> Images:
    """The images at these positions, on the disk."""
    columns = shards.index.columns
    size = np.stack([columns["height"][which], columns["width"][which]], 1)
    x = Stored(shards, torch.from_numpy(which), torch.from_numpy(size), shape[1])
    return Images(x, torch.from_numpy(label))


# Finding what is packed


def find_or_pack(name: str, root: Path | None, size: int | None, subset: str | None, progress: bool) -> Path:
    """The packed folder of a data set: the one that is named, one beside the images, or a new one there."""
    if root is None:
        raise UsageError(f"the data set {name} needs a folder of images: name it with --data")
    if (root / PACK).is_file():
        return root
    listing = list_folder(root, name, subset)
    packing = choose_packing(listing, size or SIZES.get(name))
    if name == "folder" and is_packed_as_it_is(root, size):
        packing = AS_IT_IS
    part = (subset or DEFAULT_SUBSET) if name == "imagenet-subset" else None
    packed, whole = root / packing.name(part), root / packing.name(None)
    if part is not None and not (packed / PACK).is_file() and (whole / PACK).is_file():
        packed, listing = whole, list_folder(root)
    if (packed / PACK).is_file():
        check_same(packed, listing, packing)
    else:
        pack_first(listing, packed, packing, progress)
    return packed


AS_IT_IS = Packing(None)
"""of small images that all have one size"""


def is_packed_as_it_is(root: Path, size: int | None) -> bool:
    """Whether a folder is packed without a size, by images that are squares of this one."""
    packed = root / AS_IT_IS.name(None)
    if size is None or not (packed / PACK).is_file() or read_info(packed)["packing"] != asdict(AS_IT_IS):
        return False
    return find_packed_shape(packed, asdict(AS_IT_IS), None, open_shards(packed).index) == (3, size, size)


def pack_first(listing: Listing, packed: Path, packing: Packing, progress: bool) -> None:
    """Pack a folder at its first use, and say so."""
    if not progress:
        pack(listing, packed, packing)
        return
    count = format_count(len(listing.train) + len(listing.test), "image")
    print(f"packing {count} of {listing.root} into {packed}, once; {listing.split}", file=sys.stderr, flush=True)
    with show_progress(listing) as tell:
        pack(listing, packed, packing, tell=tell)
    if left_out := read_info(packed)["left_out"]:
        words = f"{format_count(left_out, 'image')} left out, which cannot be decoded"
        print(f"{words}: see {packed / 'report.txt'}", file=sys.stderr, flush=True)


def find_shape(name: str, root: Path | None, size: int | None) -> tuple[int, int, int]:
    """The shape of the images of a data set as a net sees them, without packing it."""
    size = size or SIZES.get(name)
    if size is None and root is not None and (root / PACK).is_file():
        info = read_info(root)
        return find_packed_shape(root, info["packing"], None, open_shards(root).index)
    if size is None and root is not None:
        listing = list_folder(root)
        if choose_packing(listing, None).size is None:
            width, height = sample_sizes(root, listing.train)[0]
            return 3, height, width
    return 3, size or LARGE, size or LARGE


def find_packed_shape(folder: Path, packing: dict[str, int], size: int | None, index: Index) -> tuple[int, int, int]:
    """The shape that packed images are seen in; refuses another size."""
    if packing["size"] is None:
        shape = 3, int(index.columns["height"][0]), int(index.columns["width"][0])
    else:
        shape = 3, packing["size"], packing["size"]
    if size is not None and shape[1:] != (size, size):
        raise DataError(f"{folder} is packed for images of {shape[2]} x {shape[1]} pixels, not for --size {size}")
    return shape
