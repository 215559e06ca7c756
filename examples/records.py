"""JSON lines of a timing: what all lines of a run share, and how they are written."""

import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jax_fused_topk import build_info

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from receipt import source_sha256  # noqa: E402


def describe(suite: str, device: jax.Device) -> dict[str, Any]:
    """When, on what and with which kernels: "run_id", "suite", "card", versions, source hash."""
    now = datetime.datetime.now(datetime.UTC)
    info = build_info()
    return {
        "run_id": f"{now:%Y%m%dT%H%M%SZ}-{suite}",
        "suite": suite,
        "source_sha256": source_sha256(),
        "card": device.device_kind if device.platform == "gpu" else f"{os.cpu_count()} CPU cores",
        **{name: info[name] for name in ("version", "jax", "jaxlib", "cuda_toolkit")},
        "inputs": "random",
    }


def write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Writes lines to a file, whose folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
