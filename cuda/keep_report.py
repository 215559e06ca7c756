"""Compiler launcher: runs nvcc and keeps what ptxas reports of each source.

Usage: keep_report.py FOLDER NVCC ARGUMENT...
Writes FOLDER/<source>.log for a command that compiles a .cu file.
"""

import pathlib
import subprocess
import sys

folder, command = pathlib.Path(sys.argv[1]), sys.argv[2:]
done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
sys.stderr.write(done.stderr)
for source in (a for a in command if a.endswith(".cu")):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / (pathlib.Path(source).name + ".log")).write_text(done.stderr)
sys.exit(done.returncode)
