"""Where to put labels so that they cover neither each other nor the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.offsetbox import AnnotationBbox, OffsetBox, OffsetImage, TextArea, VPacker

from blr_analysis.plots._canvas import whole_figure

_ANGLES = np.arange(24) * (2 * np.pi / 24) + np.pi / 4
_GAPS = np.array([7.0, 12.0, 18.0, 28.0, 40.0, 55.0, 75.0, 100.0, 130.0, 165.0])
_ALONG = np.linspace(0, 1, 33)  # of a line from an anchor to its box
IMAGE_HEIGHT, TEXT_HEIGHT = 30.0, 24.0  # in points (1/72 inch); of the text with its margins
GAP = 4.0  # pixels between images
MARKER = 6.0  # pixels from a marker's middle to its edge: that much room beside every box


def label_points(
    ax: Axes,
    points: np.ndarray,
    texts: Sequence[str],
    crowd: np.ndarray,
    images: Sequence[np.ndarray] | None = None,
    cmap: str = "gray",
    avoid: Sequence[Artist] = (),
    shelf: tuple[float, float] = (1.0, 1.0),
) -> list[AnnotationBbox]:
    """Label points, each with its text and, where given, its image above the text.

    Texts stand near their points, images side by side on a shelf above all of them; those for
    which the shelf has no room, near their points too.

    Args:
        points: [K, 2] in data coordinates, the most important first.
        texts: K labels.
        crowd: [M, 2] what should not be covered, in data coordinates.
        images: K arrays that ``imshow`` takes.
        avoid: artists that must not be covered, such as other texts.
        shelf: bottom and top of the shelf, in shares of the axes' height.
    """
    if not len(points):
        return []
    figure = whole_figure(ax)
    height = 0.0 if images is None else _image_height(ax, images, shelf[1] - shelf[0])
    boxes = []
    for k, (point, text) in enumerate(zip(points, texts, strict=True)):
        content: OffsetBox = TextArea(text, textprops={"fontsize": 8})
        if images is not None:
            zoom = height / images[k].shape[0]
            picture = OffsetImage(images[k], zoom=zoom, cmap=cmap, interpolation="nearest")
            content = VPacker(children=[picture, content], align="center", pad=0, sep=1)
        box = AnnotationBbox(
            content,
            (float(point[0]), float(point[1])),
            xybox=(0, 0),
            xycoords="data",
            boxcoords="offset points",
            pad=0.15,
            arrowprops={
                "arrowstyle": "-",
                "lw": 0.6,
                "color": "0.3",
                "shrinkB": 3,
                "relpos": (0.5, 0.5 if images is None else 0.0),
            },
            bboxprops={"fc": "white", "ec": "0.6", "lw": 0.5, "alpha": 0.9},
            annotation_clip=False,
            zorder=5,
        )
        box.set_in_layout(False)  # or the layout would move with the labels
        boxes.append(ax.add_artist(box))
    figure.draw_without_rendering()  # lays the figure out, so that pixels mean something
    extents = [box.get_window_extent() for box in boxes]
    sizes = np.array([(e.width, e.height) for e in extents])
    frame = ax.get_window_extent()
    anchors = ax.transData.transform(points)
    taken = [tuple(artist.get_window_extent().extents) for artist in avoid]
    across = np.empty(0)
    if images is not None:
        across = shelve(anchors[:, 0], sizes[:, 0], frame.x0 + GAP, frame.x1 - GAP)
    held = len(across)
    bottom = frame.y0 + shelf[0] * frame.height + MARKER + GAP
    centres = np.column_stack([across, bottom + sizes[:held, 1] / 2])
    taken += [(*c - s / 2, *c + s / 2) for c, s in zip(centres, sizes, strict=False)]
    near = place(
        anchors[held:],
        sizes[held:],
        (frame.x0, frame.y0, frame.x1, frame.y1),
        ax.transData.transform(crowd[:: max(1, len(crowd) // 4000)]),
        taken,
    )
    offsets = (np.vstack([centres, near]) - anchors) * 72 / figure.dpi
    for box, offset in zip(boxes, offsets, strict=True):
        box.xybox = (float(offset[0]), float(offset[1]))
    farthest_first = np.argsort(-np.linalg.norm(offsets, axis=1))  # long lines run below boxes
    for rank, k in enumerate(farthest_first):
        boxes[k].set_zorder(boxes[k].get_zorder() + rank / len(boxes))
    return boxes


def shelf_height(ax: Axes) -> float:
    """The share of the axes' height that a shelf of images takes."""
    return min(0.25, (IMAGE_HEIGHT + TEXT_HEIGHT) / _points(ax)[1])


def shelve(anchors: np.ndarray, widths: np.ndarray, left: float, right: float) -> np.ndarray:
    """Middles of the first boxes, as many as fit between two edges side by side: each as near as
    possible above its anchor, in the anchors' order. All in pixels."""
    fit = int((np.cumsum(widths + GAP) <= right - left + GAP).sum())
    order = np.argsort(anchors[:fit], kind="stable")
    starts = np.empty(fit)
    edge = left
    for k in order:
        starts[k] = max(anchors[k] - widths[k] / 2, edge)
        edge = starts[k] + widths[k] + GAP
    edge = right
    for k in order[::-1]:
        starts[k] = min(starts[k], edge - widths[k])
        edge = starts[k] - GAP
    return starts + widths[:fit] / 2


def _image_height(ax: Axes, images: Sequence[np.ndarray], shelf: float) -> float:
    """In points: what the shelf has room for, one above and all side by side; at least 8."""
    wide, high = _points(ax)
    across = 0.9 * wide / len(images) - 8  # of each, without margins
    aspect = float(np.mean([image.shape[1] / image.shape[0] for image in images]))
    return max(8.0, min(IMAGE_HEIGHT, shelf * high - TEXT_HEIGHT, across / aspect))


def _points(ax: Axes) -> tuple[float, float]:
    """Width and height of axes."""
    box, dpi = ax.get_window_extent(), whole_figure(ax).dpi
    return max(box.width, 1.0) * 72 / dpi, max(box.height, 1.0) * 72 / dpi


def place(
    anchors: np.ndarray,
    sizes: np.ndarray,
    frame: tuple[float, float, float, float],
    crowd: np.ndarray,
    taken: Sequence[tuple[float, ...]] = (),
) -> np.ndarray:
    """Centres [K, 2] of K boxes near their anchors, chosen one after the other.

    Each box tries rings of places around its anchor and takes the cheapest: overlapping an
    earlier box or leaving the frame costs most, then covering an anchor, then a line to an anchor
    that runs through a box, then covering data, then distance.

    Args:
        anchors: [K, 2] what the boxes belong to. All arguments are in pixels.
        sizes: [K, 2] widths and heights.
        frame: x0, y0, x1, y1 to stay in.
        crowd: [M, 2] points that are better left visible.
        taken: x0, y0, x1, y1 of boxes that stand there already.
    """
    directions = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
    low, high = np.array(frame[:2]), np.array(frame[2:])
    corners = np.array(taken, dtype=float).reshape(-1, 4)
    taken_low, taken_high = corners[:, :2], corners[:, 2:]
    centres = np.empty_like(anchors, dtype=float)
    lines = np.empty((0, 2))  # points on those of the earlier boxes
    for k, (anchor, size) in enumerate(zip(anchors, sizes, strict=True)):
        reach = (size / 2)[None, None] + _GAPS[:, None, None]
        tries = (anchor + reach * directions[None]).reshape(-1, 2)
        box_low, box_high = tries - size / 2, tries + size / 2
        outside = np.maximum(low - box_low, 0) + np.maximum(box_high - high, 0)
        shared = np.minimum(box_high[:, None], taken_high) - np.maximum(box_low[:, None], taken_low)
        overlap = np.prod(np.maximum(shared + 2, 0), axis=2).sum(axis=1)
        steps = anchor + _ALONG[:, None] * (tries - anchor)[:, None]
        through = (steps[:, :, None] > taken_low) & (steps[:, :, None] < taken_high)
        crossed = through.all(-1).any(1).sum(1) + (_covered(box_low, box_high, lines) > 0)
        cost = (
            1e6 * outside.sum(axis=1)
            + 1e4 * overlap
            + 1000 * _covered(box_low - MARKER, box_high + MARKER, anchors)
            + 500 * crossed
            + 4 * np.minimum(_covered(box_low - MARKER, box_high + MARKER, crowd), 60)
            + np.repeat(_GAPS, len(directions)) / 4
        )
        best = int(np.argmin(cost))
        centres[k] = tries[best]
        lines = np.vstack([lines, steps[best]])
        taken_low = np.vstack([taken_low, box_low[best]])
        taken_high = np.vstack([taken_high, box_high[best]])
    return centres


def _covered(box_low: np.ndarray, box_high: np.ndarray, points: np.ndarray) -> np.ndarray:
    """How many of the points each box covers."""
    inside_x = (points[:, 0] > box_low[:, :1]) & (points[:, 0] < box_high[:, :1])
    inside_y = (points[:, 1] > box_low[:, 1:]) & (points[:, 1] < box_high[:, 1:])
    return (inside_x & inside_y).sum(axis=1)
