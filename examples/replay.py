"""Loads the committed slice of real-text replay; `data/README.md` says what it is."""

from pathlib import Path

import ml_dtypes
import numpy as np

SLICE = Path(__file__).resolve().parent / "data" / "replay_n16384_q64.npz"


def load_slice(path: Path | str = SLICE) -> dict[str, np.ndarray]:
    """Returns the slice's arrays, named as `index_topk` names its arguments.

    Returns:
      q: float8_e4m3fn [64, 64, 128], (query, head, dimension)
      k: float8_e4m3fn [16384, 128]
      weights: float32 [64, 64]
      k_scale: float32 [16384]
      starts: int32 [64], all 0
      ends: int32 [64]; query i may use the keys before 16321 + i, its own included
    """
    names = ("q", "k", "weights", "k_scale", "starts", "ends")
    with np.load(path, allow_pickle=False) as file:
        data = {name: file[name] for name in names}
    for name in ("q", "k"):
        data[name] = data[name].view(ml_dtypes.float8_e4m3fn)
    return data
