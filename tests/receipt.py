"""The receipt of a GPU test run: which kernel sources passed, where and when.

`receipt.py check` exits 1 with one line when tests/gpu_receipt.json is missing or
was written for other sources than the tree's.  Standard library only, so that it
runs with any interpreter.
"""

import hashlib
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECEIPT = ROOT / "tests" / "gpu_receipt.json"
HASHED = ("cuda", "ffi")


def source_sha256(root: pathlib.Path = ROOT) -> str:
    """One digest over the names and bytes of every file under cuda/ and ffi/."""
    digest = hashlib.sha256()
    for folder in HASHED:
        for path in sorted(p for p in (root / folder).rglob("*") if p.is_file()):
            if "__pycache__" in path.parts:
                continue
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def problem(receipt: pathlib.Path = RECEIPT, root: pathlib.Path = ROOT) -> str | None:
    """Why the receipt does not cover the tree, in one line; None if it does."""
    if not receipt.exists():
        return f"no GPU receipt ({receipt.name}): these kernels were not tested on a GPU"
    read = json.loads(receipt.read_text())
    if read["source_sha256"] != source_sha256(root):
        return (
            f"the GPU receipt of {read['date']} ({read['card']}) is for other sources of "
            f"{' and '.join(HASHED)}: run `make gpu-test` on a GPU"
        )
    if read["selection"] != "gpu":
        return f"the GPU receipt of {read['date']} is for a part of the tests: {read['selection']}"
    if read["counts"].get("failed") or not read["counts"].get("passed"):
        return f"the GPU receipt of {read['date']} ({read['card']}) records no clean pass"
    return None


def main(arguments: list[str]) -> int:
    """Runs `check`, the only command."""
    if arguments != ["check"]:
        print("usage: receipt.py check", file=sys.stderr)
        return 2
    found = problem()
    print(f"WARNING: {found}" if found else "the GPU receipt is for the sources at hand")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
