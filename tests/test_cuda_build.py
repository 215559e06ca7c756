"""What the CUDA compilation left behind: no spills, no serialised MMA, no fast math.

Needs the build folder, not a GPU.
"""

import pathlib
import re

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
