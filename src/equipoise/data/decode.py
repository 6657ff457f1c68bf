"""Image files to pixels, exactly as Pillow decodes, converts and resizes them. Imports no torch: workers start fast."""

from __future__ import annotations

import importlib
import io
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

from PIL import Image

simplejpeg: Any
try:
    simplejpeg = importlib.import_module("simplejpeg")
except ImportError:  # Pillow does it all, a little slower
    simplejpeg = None

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")
"""what is tried, by the first bytes of a file and not by its name; Pillow opens others by running programs"""
ENDINGS = {
    "JPEG": (".jpg", ".jpeg"), "MPO": (".jpg", ".jpeg", ".mpo"), "TIFF": (".tif", ".tiff"), "PPM": (".ppm", ".pgm"),
}  # fmt: skip
"""of the files of a format; of others, its name"""
ORIENTATION = 0x0112
"""the EXIF tag that says how a photograph is to be turned"""
KINDS = {
    "greyscale": "greyscale, the same value in each channel",
    "palette": "with a palette",
    "CMYK": "CMYK, converted to RGB",
    "16-bit": "of more than 8 bits a channel, of which Pillow cuts off grey ones above 255",
    "alpha": "with transparency, which is dropped",
    "frames": "of several frames, of which the first is used",
    "EXIF": "to be turned by EXIF, which is ignored",
    "misnamed": "of another format than their name says",
}
"""what is unusual in an image that is used nevertheless"""
MODES = {
    "1": "greyscale", "L": "greyscale", "LA": "greyscale alpha", "P": "palette", "PA": "palette alpha", "CMYK": "CMYK",
    "YCCK": "CMYK", "RGBA": "alpha", "RGBX": "", "RGB": "", "YCbCr": "", "I": "16-bit", "F": "16-bit",
}  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """The size of decoded images: their own, or by their short side."""

    side: int | None = None
    """short side in pixels; None to leave images as they are"""
    square: bool = False
    """whether to keep the centre square only"""
    enlarge: bool = False
    """whether to enlarge images with a smaller short side"""
    keep: int | None = None
    """squares of this side stay as they are"""

    def scale(self, w: int, h: int) -> tuple[int, int]:
        """Width and height of a resized image, before the crop."""
        short = min(w, h)
        if self.side is None or w == h == self.keep or short == self.side or (short < self.side and not self.enlarge):
            return w, h
        return self.side * w // short, self.side * h // short

    def count_bytes(self, w: int, h: int) -> int:
        """Bytes of an image of this size, as it is stored."""
        w, h = self.scale(w, h)
        return 3 * min(w, h) ** 2 if self.square else 3 * w * h

    def __call__(self, image: Image.Image) -> Image.Image:
        """Resize by Pillow's bilinear filter, then crop; rounded as torchvision's Resize and CenterCrop do."""
        w, h = self.scale(*image.size)
        image = image if (w, h) == image.size else image.resize((w, h), Image.Resampling.BILINEAR)
        if self.square and w != h:
            side = min(w, h)
            left, top = round((w - side) / 2), round((h - side) / 2)
            image = image.crop((left, top, left + side, top + side))
        return image


class Decoded(NamedTuple):
    """An image as it is stored."""

    image: Image.Image
    """RGB"""
    kinds: str
    """what is unusual in it, as words of KINDS; mostly empty"""


class BadImageError(Exception):
    """A file from which no image can be decoded; the message says why."""


def decode(data: bytes, name: str, fit: Fit) -> Decoded:
    """Decode the content of a file and resize it."""
    if not data:
        raise BadImageError("the file is empty")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd EXIF and transparency
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as file:
                kinds = " ".join(find_kinds(file, name))
                return Decoded(fit(convert(file, data)), kinds)
        except (Image.DecompressionBombWarning, Image.DecompressionBombError):
            raise BadImageError(f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels") from None
        except Image.UnidentifiedImageError:
            raise BadImageError("it is not an image of a known format") from None
        except MemoryError:
            raise BadImageError("it does not fit into memory") from None
        except Exception as error:  # a damaged file can raise almost anything
            raise BadImageError((str(error).splitlines() or [type(error).__name__])[0]) from None


def convert(file: Image.Image, data: bytes) -> Image.Image:
    """The pixels of an opened file as RGB.

    simplejpeg gives the same ones for ordinary JPEG files, faster. It refuses every damaged file, of which Pillow reads
    some: that decides.
    """
    if simplejpeg is not None and file.format == "JPEG" and file.mode in ("L", "RGB"):
        try:
            pixels: Any = simplejpeg.decode_jpeg(data, "GRAY" if file.mode == "L" else "RGB")
        except ValueError:
            pass
        else:
            return Image.fromarray(pixels[..., 0] if file.mode == "L" else pixels).convert("RGB")
    return file.convert("RGB")


def find_kinds(file: Image.Image, name: str) -> list[str]:
    """What is unusual in an opened file."""
    format, mode = file.format or "", file.mode
    kinds = MODES.get(mode, "16-bit" if mode.startswith("I;") else "").split()
    tiles = getattr(file, "tile", [])  # how the file has its pixels
    if tiles and ";16" in str(tiles[0][3:]) and "16-bit" not in kinds:
        kinds.append("16-bit")
    if "transparency" in file.info and "alpha" not in kinds:
        kinds.append("alpha")
    if getattr(file, "n_frames", 1) > 1:
        kinds.append("frames")
    if "exif" in file.info and file.getexif().get(ORIENTATION, 1) in range(2, 9):
        kinds.append("EXIF")
    if not name.lower().endswith(ENDINGS.get(format, (f".{format.lower()}",))):
        kinds.append("misnamed")
    return kinds
