"""Folders of images for tests, with all that can be wrong with a file."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def make_image(seed: int, width: int = 20, height: int = 16) -> Image.Image:
    """A smooth image, of which JPEG keeps most."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def write(path: Path, image: Image.Image, format: str | None = None, **settings: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, format, **settings)
    return path


def encode(image: Image.Image, format: str, **settings: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, format, **settings)
    return data.getvalue()


def encode_16_bit(pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG with 16 bits a channel, which Pillow reads and does not write."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def make_tree(root: Path, classes: int = 3, train: int = 4, test: int = 2, **size: int) -> Path:
    """A folder with train and val, as PNG: class k has pictures 0, 1, ... of its own."""
    for part, count in (("train", train), ("val", test)):
        for c in range(classes):
            for k in range(count):
                write(
                    root / part / f"class{c}" / f"{k:03}.png", make_image(1000 * c + k + 500 * (part == "val"), **size)
                )
    return root


def write_odd(folder: Path) -> dict[str, str]:
    """One of each kind of file that is used though unusual: its name, and what it is."""
    image = make_image(1)
    grey, exif = image.convert("L"), Image.Exif()
    exif[0x0112] = 6
    rotated = encode(image, "JPEG", exif=exif)
    veiled = image.convert("RGBA")
    veiled.putalpha(100)
    wide = np.random.default_rng(0).integers(0, 65536, (16, 20, 3))
    odd = {
        "grey.jpg": (encode(grey, "JPEG"), "greyscale"),
        "bits.png": (encode(grey.convert("1"), "PNG"), "greyscale"),
        "deep.png": (encode(Image.fromarray((wide[..., 0] // 100).astype(np.uint16)), "PNG"), "16-bit"),
        "deep-colour.png": (encode_16_bit(wide), "16-bit"),
        "palette.png": (encode(image.convert("P"), "PNG"), "palette"),
        "see-through.png": (encode(image.convert("P"), "PNG", transparency=0), "palette alpha"),
        "cmyk.jpg": (encode(image.convert("CMYK"), "JPEG"), "CMYK"),
        "alpha.webp": (encode(veiled, "WEBP", lossless=True), "alpha"),
        "both.png": (encode(image.convert("LA"), "PNG"), "greyscale alpha"),
        "moving.gif": (encode(image, "GIF", save_all=True, append_images=[make_image(2)]), "palette frames"),
        "rotated.jpg": (rotated, "EXIF"),
        "n02105855_2933.JPEG": (encode(image, "PNG"), "misnamed"),
        "progressive.jpg": (encode(image, "JPEG", progressive=True), ""),
        "broad.tif": (encode(image, "TIFF"), ""),
    }
    for name, (data, _) in odd.items():
        (folder / name).write_bytes(data)
    return {name: kind for name, (_, kind) in odd.items()}


def write_bad(folder: Path) -> dict[str, str]:
    """One of each kind of file that is no image: its name, and what the report says."""
    whole, png = encode(make_image(3, 200, 200), "JPEG"), encode(make_image(3, 200, 200), "PNG")
    bomb = bytearray(encode(make_image(3), "PNG"))
    bomb[16:24] = struct.pack(">II", 20_000, 20_000)
    bomb[29:33] = struct.pack(">I", zlib.crc32(bomb[12:29]))
    bad = {
        "truncated.jpg": (whole[: len(whole) // 2], "truncated"),
        "truncated.png": (png[: len(png) // 2], "truncated"),
        "header.jpg": (whole[:20], "[a-z]"),
        "empty.jpg": (b"", "empty"),
        "text.jpg": (b"<html>not found</html>", "not an image of a known format"),
        "bomb.png": (bytes(bomb), "pixels"),
        "script.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n", "not an image"),
    }
    for name, (data, _) in bad.items():
        (folder / name).write_bytes(data)
    return {name: why for name, (_, why) in bad.items()}
