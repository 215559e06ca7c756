"""Runs the public functions with one implementation, numpy in and numpy out."""

import functools
import types

import jax
import numpy as np

import jax_fused_topk
from jax_fused_topk import _ffi

_index_topk = jax.jit(
    jax_fused_topk.index_topk, static_argnames=("topk", "order", "return_scores", "implementation")
)
_index_scores = jax.jit(jax_fused_topk.index_scores, static_argnames="implementation")
_top_k = jax.jit(jax_fused_topk.top_k, static_argnames=("k", "order", "implementation"))

# What the compiled module _cuda says of the shapes it serves, for where it is not built.
CUDA_LIMITS = types.SimpleNamespace(
    MAX_HEADS=256, MAX_DIM=256, DIM_MULTIPLE=16, MAX_INDEX_TOPK=4096, MAX_SORTED_K=65536
)

# Sizes of the Hopper path's tests: so many rows of so many keys do not get dense scores, and of
# MANY rows the sample leaves some windows out.
QUERIES, MANY = 1024, 3000
LONG = 40_009


def missing_for_cuda():
    """What keeps the CUDA implementation from running here, or None."""
    info = jax_fused_topk.build_info()
    if not info["cuda"]:
        return f"jax_fused_topk was built without CUDA kernels: {info['cuda_error']}"
    if not _devices("cuda"):
        return "JAX sees no NVIDIA GPU"
    return None


@functools.cache
def _devices(platform):
    try:
        return tuple(jax.devices(platform))
    except RuntimeError:
        return ()


class Runner:
    """One implementation on a device that it runs on."""

    def __init__(self, name):
        self.name = name
        self.device = _devices("cuda" if name == "cuda" else "cpu")[0]

    def __repr__(self):
        return f"Runner({self.name!r})"

    def arithmetic(self, x):
        """The `oracles.UNIT` of the scores of `inputs.Inputs`."""
        if self.name != "cuda":
            return self.name
        *_, heads, dim = x.q.shape
        fp8 = x.q.dtype.itemsize == 1
        hopper = self.device.compute_capability.startswith("9.")
        served = _ffi.cuda_module().hopper_supported(fp8, heads, dim)
        return "hopper" if hopper and served else "cuda"

    def put(self, tree):
        """Moves arrays to the runner's device; None stays None."""
        return jax.tree.map(lambda x: jax.device_put(x, self.device), tree)

    def index_topk(self, x, topk, order="index", return_scores=False):
        """Returns indices, or (scores, indices), of `inputs.Inputs`."""
        out = _index_topk(
            **self.put(x._asdict()),
            topk=topk,
            order=order,
            return_scores=return_scores,
            implementation=self.name,
        )
        return jax.tree.map(np.asarray, out)

    def index_scores(self, x):
        """Returns the scores of `inputs.Inputs`."""
        return np.asarray(_index_scores(**self.put(x._asdict()), implementation=self.name))

    def top_k(self, x, k, starts=None, ends=None, order="score"):
        """Returns (values, indices)."""
        x, starts, ends = self.put((x, starts, ends))
        out = _top_k(x, k, starts=starts, ends=ends, order=order, implementation=self.name)
        return jax.tree.map(np.asarray, out)
