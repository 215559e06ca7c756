"""The Hopper score loops as ptxas wrote them: what to look at before a kernel is timed.

    python -m benchmarks loops

The same source outside a loop can move ptxas to another assignment of registers, and the loop
by some percent.  Three figures of a loop tell most of it: instructions a head, since a scheduler
issues about one in two cycles under the tensor cores' load; loads and stores of spilled registers,
of which there must be none; and how many of a head's FMAs come after the next head's product,
because that product starts as soon as the others have read the accumulators.
"""

import argparse
import itertools
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import hopper_library
from benchmarks.inputs import ROOT

PREDICATE = re.compile(r"^@!?U?P\d+ ")


@dataclass(frozen=True)
class Loop:
    """The loop over heads of one score kernel.

    Attributes:
      mode: name of the kernel's Mode.
      heads: H of the kernel.
      unrolled: heads in the loop's body.
      instructions: in the loop's body.
      spills: LDL and STL among them.
      late_fmas: FMAs between a head's first product and the next wait, for each head but the
        first, whose product the loop's branch keeps behind all FMAs.
    """

    mode: str
    heads: int
    unrolled: int
    instructions: int
    spills: int
    late_fmas: tuple[int, ...]


def modes() -> list[str]:
    """The names of cuda/hopper_work.cuh's Mode, in order."""
    text = (ROOT / "cuda" / "hopper_work.cuh").read_text()
    found = re.search(r"enum class Mode \{([^}]*)\}", text)
    assert found is not None
    return [name.strip() for name in found[1].split(",")]


def functions(sass: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """(mangled name, [(address, instruction)]) of what `cuobjdump -sass` lists."""
    for part in sass.split("Function : ")[1:]:
        name, *lines = part.splitlines()
        found = (re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line) for line in lines)
        yield name.strip(), [(int(x[1], 16), x[2]) for x in found if x is not None]


def score_loops(sass: str) -> list[Loop]:
    """The loops of all score kernels in a listing."""
    names = modes()
    found = []
    for name, code in functions(sass):
        kernel = re.search(r"score_kernelILNS\w*?4ModeE(\d+)ELi(\d+)EE", name)
        if kernel is not None:
            found.append(_loop(code, names[int(kernel[1])], int(kernel[2])))
    return sorted(found, key=lambda loop: (names.index(loop.mode), -loop.heads))


def _loop(code: list[tuple[int, str]], mode: str, heads: int) -> Loop:
    products = [i for i, (_, text) in enumerate(code) if "QGMMA" in text]
    for end in range(products[-1], len(code)):
        target = re.search(r"BRA 0x([0-9a-f]+)", code[end][1])
        if target is not None and int(target[1], 16) <= code[products[0]][0]:
            break
    else:
        raise ValueError(f"the products of {mode}, {heads} heads, are in no loop")
    body = [PREDICATE.sub("", text) for at, text in code[: end + 1] if at >= int(target[1], 16)]
    waits = [i for i, text in enumerate(body) if text.startswith("WARPGROUP.DEPBAR")]
    late = []
    for before, after in itertools.pairwise(waits):
        first = next(i for i in range(before, after) if body[i].startswith("QGMMA"))
        late.append(sum(text.startswith("FFMA") for text in body[first:after]))
    spills = sum(text.startswith(("LDL", "STL")) for text in body)
    return Loop(mode, heads, len(waits), len(body), spills, tuple(late))


def main(arguments: list[str]) -> int:
    """Runs `python -m benchmarks loops`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks loops",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "binary", type=Path, nargs="?", help="a library or cubin (the installed module)"
    )
    binary = parser.parse_args(arguments).binary
    cuobjdump = hopper_library.find_program("cuobjdump")
    if cuobjdump is None:
        parser.error("loops needs cuobjdump, of the CUDA toolkit: none on PATH")
    if binary is None:
        from jax_fused_topk import _ffi, build_info

        if not build_info()["cuda"]:
            parser.error(f"the CUDA kernels were not compiled: {build_info()['cuda_error']}")
        binary = Path(_ffi.cuda_module().__file__)
    elif not binary.is_file():
        parser.error(f"binary must be a file, got {binary}")
    listing = [str(cuobjdump), "-sass", "-arch", "sm_90a", str(binary)]
    sass = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    for loop in score_loops(sass):
        late = " ".join(map(str, loop.late_fmas))
        print(
            f"{loop.mode:<16}{loop.heads:>3} heads{loop.instructions / loop.unrolled:8.1f} "
            f"instructions a head{loop.spills:4} spills   FMAs after the next product: {late}"
        )
    return 0
