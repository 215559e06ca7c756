"""Cuts the demo's slice out of a replay file: the same bytes on every run."""

import argparse
import hashlib
import importlib.util
import io
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

QUERIES = 64
KEYS = 16_384


def load_module(path: Path) -> types.ModuleType:
    """Returns the Python file at `path` as a module."""
    spec = importlib.util.spec_from_file_location("replay_source", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_stored(array: np.ndarray) -> np.ndarray:
    """Returns FP8 as its bytes (npy files know no FP8), anything else as it is."""
    return array.view(np.uint8) if array.dtype.itemsize == 1 else array


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes an .npz with a fixed date and without compression.

    Its bytes then depend on the arrays alone, not on the clock, the machine or zlib.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3  # Unix, wherever this runs
            info.external_attr = 0o644 << 16
            archive.writestr(info, member.getvalue())


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the arguments, writes the slice and prints its size and SHA-256."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--replay",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="the folder of replay.py and replay_layer2.npz",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .npz to write")
    args = parser.parse_args(argv)

    replay = load_module(args.replay / "replay.py")
    data = replay.load(args.replay / "replay_layer2.npz", QUERIES, KEYS)
    write_npz(args.out, {name: as_stored(array) for name, array in data.items()})

    content = args.out.read_bytes()
    print(f"{args.out}: {len(content):,} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
