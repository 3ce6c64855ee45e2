"""Thumbnails of all examples on one sheet, so that a page carries one picture and not thousands."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from blr_analysis.errors import DataError
from blr_analysis.plots import image_of

BUDGET = 2_400_000  # bytes of a sheet before base64; the whole page stays below 6 MB
EDGES = (48, 32, 24, 16)  # pixels of a tile, tried in turn until the sheet fits
WAYS: tuple[dict[str, Any], ...] = (  # of writing a sheet, the finest first
    {"lossless": True, "quality": 40},
    {"quality": 80},
    {"quality": 50},
    {"quality": 25},
)
SAMPLE = 300  # pictures that tell how large the sheet will be


@dataclass(frozen=True)
class Thumbnails:
    """Tiles of one size, row by row: example k is tile k.

    Attributes:
        uri: the picture as a ``data:`` URI.
        edge: pixels of a tile, both ways.
        across: tiles in a row.
        n: how many there are.
    """

    uri: str
    edge: int
    across: int
    n: int

    @property
    def down(self) -> int:
        return math.ceil(self.n / self.across)


def sheet_of(pictures: Sequence[np.ndarray], budget: int = BUDGET) -> Thumbnails:
    """Pictures [H, W] or [H, W, 3] of bytes on one sheet of at most ``budget`` bytes.

    Small pictures are kept to the pixel while they fit; larger ones shrink, and where there are
    very many, tiles become smaller and coarser.
    """
    largest = max(max(p.shape[:2]) for p in pictures)
    edges = [e for e in EDGES if e < largest] or [EDGES[-1]]
    edges = [largest, *edges] if largest <= EDGES[0] else edges
    some = pictures[:: math.ceil(len(pictures) / SAMPLE)]
    share = budget * len(some) / len(pictures)
    *ways, last = [(e, o) for e in edges for o in WAYS]
    for edge, options in ways:
        if len(some) < len(pictures) and len(_written(some, edge, options)[0]) > share:
            continue
        written, across = _written(pictures, edge, options)
        if len(written) <= budget:
            return Thumbnails(_uri(written), edge, across, len(pictures))
    written, across = _written(pictures, *last)
    return Thumbnails(_uri(written), last[0], across, len(pictures))


def picture_of(images: Any, index: int) -> np.ndarray:
    """Example ``index`` as bytes [H, W] or [H, W, 3], whatever shape and range it comes in.

    Raises:
        InputError: it is no image.
        DataError: bytes that no image format knows.
    """
    item = images[index] if isinstance(images, Sequence) and index < len(images) else None
    if isinstance(item, bytes | bytearray):
        try:
            item = Image.open(io.BytesIO(item))
            item.load()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"images[{index}] holds bytes that are no image") from error
    if isinstance(item, Image.Image):
        images = {index: np.asarray(item.convert("L" if item.mode in ("1", "L") else "RGB"))}
    picture = image_of(images, index)
    if picture.ndim == 3 and picture.shape[-1] == 4:
        alpha = picture[..., 3:]
        picture = picture[..., :3] * alpha + (1 - alpha)
    return np.round(255 * picture).clip(0, 255).astype(np.uint8)


def _written(
    pictures: Sequence[np.ndarray], edge: int, options: dict[str, Any]
) -> tuple[bytes, int]:
    """The sheet's bytes, and how many tiles stand in a row."""
    sheet, across = _laid_out(pictures, edge)
    file = io.BytesIO()
    sheet.save(file, "WEBP", method=2, **options)
    return file.getvalue(), across


def _laid_out(pictures: Sequence[np.ndarray], edge: int) -> tuple[Image.Image, int]:
    across = min(math.ceil(math.sqrt(len(pictures))), 16383 // edge)
    mode = "RGB" if any(p.ndim == 3 for p in pictures) else "L"
    sheet = Image.new(mode, (across * edge, math.ceil(len(pictures) / across) * edge), 128)
    for k, picture in enumerate(pictures):
        tile = Image.fromarray(picture)
        scale = edge / max(tile.size)
        if scale != 1:
            size = max(1, round(scale * tile.width)), max(1, round(scale * tile.height))
            smooth = Image.Resampling.BOX if scale < 1 else Image.Resampling.NEAREST
            tile = tile.resize(size, smooth)
        left, top = (edge - tile.size[0]) // 2, (edge - tile.size[1]) // 2
        sheet.paste(tile, (k % across * edge + left, k // across * edge + top))
    return sheet, across


def _uri(written: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(written).decode()
