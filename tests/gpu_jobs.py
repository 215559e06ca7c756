"""Runs the GPU tests in several processes at once, and writes one receipt.

    python tests/gpu_jobs.py 4 [pytest's arguments]

Most of the tests' time is compilation on the CPU.  Each process takes every n-th test;
the receipt has the sum of their counts.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from receipt import RECEIPT


def merge(parts: list[dict]) -> dict:
    """One receipt for all tests from those of the parts.

    Raises:
      ValueError: if they differ in more than their counts.
    """
    merged = {**parts[0], "counts": {}}
    for part in parts:
        if {**part, "counts": {}} != {**parts[0], "counts": {}}:
            raise ValueError(f"receipts must agree but for their counts, got {part}")
        for outcome, count in part["counts"].items():
            merged["counts"][outcome] = merged["counts"].get(outcome, 0) + count
    return merged


def main(arguments: list[str]) -> int:
    """Returns 0 if every process did."""
    jobs = int(arguments[0])
    folder = pathlib.Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as scratch:
        receipts = [pathlib.Path(scratch, f"{i}.json") for i in range(jobs)]
        logs = [pathlib.Path(scratch, f"{i}.log") for i in range(jobs)]
        running = []
        for i, (receipt, log) in enumerate(zip(receipts, logs, strict=True)):
            command = [sys.executable, "-m", "pytest", str(folder), "-m", "gpu", *arguments[1:]]
            command += ["--part", f"{i + 1}/{jobs}", "--gpu-receipt", str(receipt)]
            running.append(
                subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT)
            )
        codes = [process.wait() for process in running]
        for i, (log, code) in enumerate(zip(logs, codes, strict=True)):
            text = log.read_text().splitlines()
            print("\n".join(text if code else text[-1:]))
            print(f"part {i + 1}/{jobs}: exit code {code}")
        if all(receipt.exists() for receipt in receipts):
            merged = merge([json.loads(receipt.read_text()) for receipt in receipts])
            RECEIPT.write_text(json.dumps(merged, indent=1) + "\n")
            print(f"GPU receipt: {RECEIPT} {merged['counts']}")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
