"""The digest of the kernel sources that a run's lines carry: the GPU receipt's."""

from benchmarks.inputs import ROOT, load_module


def sha256() -> str:
    """The digest of cuda/ and ffi/.

    Raises:
      FileNotFoundError: if one of them is not beside the benchmarks.
    """
    receipt = load_module(ROOT / "tests" / "receipt.py")
    for folder in receipt.HASHED:
        if not (ROOT / folder).is_dir():
            raise FileNotFoundError(f"the kernel sources are not here: no {ROOT / folder}")
    digest: str = receipt.source_sha256()
    return digest
