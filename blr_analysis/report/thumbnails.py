"""Thumbnails of all examples on one sheet, so that the page has one picture and not thousands."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from blr_analysis.audit import Findings
from blr_analysis.audit.pictures import images_of
from blr_analysis.plots import image_of
from blr_analysis.report.contents import Neighbours, Shown

MAX_EDGE = 64  # pixels of a tile
MIN_EDGE = 8
MAX_SHEET = 5_000_000  # pixels of all tiles; a whole page of 10,000 stays below 6 MB
MAX_LOSSLESS = 300_000  # pixels of a sheet that keeps every pixel
MAX_WIDTH = 16383  # pixels of a WebP picture
QUALITY = 50  # of a sheet with loss, of 100
LOSSLESS_EFFORT = 80  # of 100


@dataclass(frozen=True)
class Thumbnails:
    """Tiles of one size, row by row: example k is tile k.

    Attributes:
        uri: the picture as a ``data:`` URI.
        edge: pixels of a tile, both ways.
        across: tiles in a row.
        n: the number of tiles.
    """

    uri: str
    edge: int
    across: int
    n: int

    @property
    def down(self) -> int:
        """The number of rows."""
        return math.ceil(self.n / self.across)


def pictures_of(
    findings: Findings, rows: Shown, neighbours: Neighbours | None, images: Any
) -> list[np.ndarray] | None:
    """Pictures of the rows, then of the test examples on the page.

    Args:
        images: of all training examples; None: the task's own inputs, if they are images.

    Returns:
        Bytes ``[H, W]`` or ``[H, W, 3]``; None without images.
    """
    if images is None:
        images = images_of(findings.task)
    if images is None:
        return None
    pictures = [picture_of(images, int(index)) for index in rows.index]
    if neighbours is None:
        return pictures
    test_images = images_of(neighbours.test)
    if test_images is not None:
        pictures += [picture_of(test_images, int(index)) for index in neighbours.chosen]
    return pictures


def sheet_of(pictures: Sequence[np.ndarray]) -> Thumbnails:
    """Pictures ``[H, W]`` or ``[H, W, 3]`` of bytes on one sheet.

    Very many pictures have smaller tiles, and only small sheets keep every pixel.
    """
    n = len(pictures)
    largest = max(max(picture.shape[:2]) for picture in pictures)
    edge = min(largest, MAX_EDGE, max(MIN_EDGE, math.isqrt(MAX_SHEET // n)))
    across = min(math.ceil(math.sqrt(n)), MAX_WIDTH // edge)
    mode = "RGB" if any(picture.ndim == 3 for picture in pictures) else "L"
    sheet = Image.new(mode, (across * edge, math.ceil(n / across) * edge), 128)
    for k, picture in enumerate(pictures):
        tile = Image.fromarray(picture)
        tile.thumbnail((edge, edge), Image.Resampling.BOX)
        row, column = divmod(k, across)
        left = (edge - tile.width) // 2
        top = (edge - tile.height) // 2
        sheet.paste(tile, (column * edge + left, row * edge + top))
    return Thumbnails(_uri_of(sheet, is_lossless=n * edge**2 <= MAX_LOSSLESS), edge, across, n)


def _uri_of(sheet: Image.Image, is_lossless: bool) -> str:
    """The sheet as a ``data:`` URI."""
    file = io.BytesIO()
    quality = LOSSLESS_EFFORT if is_lossless else QUALITY
    sheet.save(file, "WEBP", method=2, lossless=is_lossless, quality=quality)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()


def picture_of(images: Any, index: int) -> np.ndarray:
    """Example ``index`` as bytes ``[H, W]`` or ``[H, W, 3]``, from any shape and range.

    Raises:
        InputError: it is no image.
    """
    picture = image_of(images, index)
    has_transparency = picture.ndim == 3 and picture.shape[-1] == 4
    if has_transparency:
        alpha = picture[..., 3:]
        picture = picture[..., :3] * alpha + (1 - alpha)  # on white
    return np.round(255 * picture).clip(0, 255).astype(np.uint8)
