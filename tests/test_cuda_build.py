"""What the CUDA compilation left behind: no spills, no serialised MMA, no fast math.

Needs the build folder, not a GPU.
"""

import pathlib
import re

import numpy as np
import pytest

import jax_fused_topk

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted(p.name for p in (ROOT / "cuda").glob("*.cu") if "<<<" in p.read_text())


@pytest.fixture(scope="module")
def reports():
    """Ptxas's report on each source, of the newest build: name -> text."""
    info = jax_fused_topk.build_info()
    if not info["cuda"]:
        pytest.skip(f"CUDA WAS NOT COMPILED, its reports cannot be read: {info['cuda_error']}")
    folders = list((ROOT / "build").glob("*/ptxas"))
    assert folders, f"built with CUDA, but no ptxas reports under {ROOT / 'build'}"
    newest = max(folders, key=lambda f: max(p.stat().st_mtime for p in f.iterdir()))
    return {p.name.removesuffix(".log"): p.read_text() for p in newest.glob("*.cu.log")}


def test_every_source_has_a_report(reports):
    assert SOURCES, "no CUDA sources found"
    assert sorted(n for n in reports if n in SOURCES) == SOURCES
    for source in SOURCES:
        assert "Compiling entry function" in reports[source], f"{source}: no kernel in its report"


@pytest.mark.parametrize("source", SOURCES)
def test_no_spills(reports, source):
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", reports[source])
    entries = reports[source].count("Compiling entry function")
    assert len(spills) >= entries > 0
    assert set(spills) == {("0", "0")}


@pytest.mark.parametrize("source", SOURCES)
def test_no_warning_of_ptxas(reports, source):
    """C75xx tells of WGMMA that ptxas serialised."""
    assert not re.findall(r"\bC75\d\d\b", reports[source])
    assert "warning" not in reports[source].lower()


def test_no_fast_math():
    """It would flush denormals and let comparisons with NaN go either way."""
    files = [ROOT / "CMakeLists.txt", *(ROOT / "cuda").iterdir(), *(ROOT / "cpu").iterdir()]
    assert len(files) > 10
    for path in files:
        if path.is_file():
            found = re.search(r"fast[-_]math|ftz=true|-ffast|-Ofast", path.read_text())
            assert not found, f"{path.name}: {found[0]}"


@pytest.fixture
def cuda():
    """The compiled module, which needs no GPU."""
    info = jax_fused_topk.build_info()
    if not info["cuda"]:
        pytest.skip(f"CUDA WAS NOT COMPILED: {info['cuda_error']}")
    from jax_fused_topk import _ffi

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
    assert gaps.max() < spread + 7 * cuda.HOPPER_WINDOW_KEYS
