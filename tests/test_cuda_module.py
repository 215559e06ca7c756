"""What the compiled module _cuda tells of its kernels: limits, ways and samples.

Needs no GPU.
"""

import numpy as np
import pytest
from runners import LONG, MANY, QUERIES

import jax_fused_topk
from jax_fused_topk import _ffi


@pytest.fixture
def cuda():
    """The compiled module, which needs no GPU."""
    info = jax_fused_topk.build_info()
    if not info["cuda"]:
        pytest.skip(f"CUDA WAS NOT COMPILED: {info['cuda_error']}")

    return _ffi.cuda_module()


def test_served_limits_match_the_documented_box(cuda):
    info = jax_fused_topk.build_info()
    assert cuda.MAX_HEADS >= 64 and cuda.MAX_DIM >= 256 and cuda.DIM_MULTIPLE <= 16
    assert cuda.MAX_INDEX_TOPK >= 2048
    assert info["cuda_toolkit"] >= (12, 8)
    assert "90" in info["cuda_architectures"]


@pytest.mark.parametrize("queries", [1024, 4096, 8192])
@pytest.mark.parametrize("keys", [40_009, 131_072, 914_078, 1 << 20, 2**31 - 345])
def test_the_hopper_paths_sample_is_spread_over_a_row(cuda, keys, queries):
    """Groups of 8 that do not overlap, in most windows or as many as are ever sampled."""
    way = cuda.hopper_plan(1, queries, keys, 2048)
    assert not way["dense"]
    groups = np.asarray(cuda.hopper_sampled_groups(keys, way["cycle"], way["holes"]), np.int64)
    assert len(groups) <= cuda.HOPPER_MAX_SAMPLED_GROUPS
    assert groups[0] >= 0 and groups[-1] < keys + cuda.HOPPER_WINDOW_KEYS
    gaps = np.diff(groups)
    assert (groups % 8 == 0).all() and gaps.min() >= 8
    spread = keys / len(groups)
    if len(groups) < cuda.HOPPER_MAX_SAMPLED_GROUPS // 2:
        assert spread <= 1.5 * cuda.HOPPER_WINDOW_KEYS
    # Five windows in a row may have no group, and one lies anywhere in its window.
    assert gaps.max() < spread + 7 * cuda.HOPPER_WINDOW_KEYS


def test_the_gpu_tests_sizes_take_candidates(cuda):
    """The bounds of the Hopper path's ways may move: the tests would then be of another one."""
    for queries, keys in ((QUERIES, LONG), (QUERIES, 33_000), (MANY, LONG), (900, 40_000)):
        assert not cuda.hopper_plan(1, queries, keys, 2048)["dense"], (queries, keys)
    assert cuda.hopper_plan(1, QUERIES, LONG, 2048)["holes"] == 1
    assert cuda.hopper_plan(1, MANY, LONG, 2048)["holes"] > 1
