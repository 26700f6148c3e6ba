"""Programs run one after the other, each in a process that is forked from one that has imported torch and regard."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

# For each line of its input it runs a program as `python program` would, and says the process and how it ended.
FORKING = """
import json, os, runpy, sys
import regard, torch

for line in sys.stdin:
    program, folder, output = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
os.chdir(folder)
for number in (1, 2):
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.argv, sys.path[0] = [program], os.path.dirname(program)
runpy.run_path(program, run_name="__main__")
"""


class ForkedPrograms:
    """Imports torch and regard once, however many programs are run."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def run(self, program: Path, folder: Path, seconds: float) -> tuple[int, str]:
        """The exit code of a program that runs in `folder`, and all that it printed.

        Raises:
            subprocess.TimeoutExpired: it took longer than `seconds`, and was killed.
        """
        assert self.process.stdin is not None
        output = folder / "printed.txt"
        self.process.stdin.write(json.dumps([str(program), str(folder), str(output)]).encode() + b"\n")
        child = self.read_number()
        code = self.read_number(seconds)
        if code is None:
            os.kill(child, signal.SIGKILL)
            self.read_number()
            raise subprocess.TimeoutExpired(str(program), seconds)
        return code, output.read_text()

    def read_number(self, seconds: float | None = None) -> int | None:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return None
        return int(self.process.stdout.readline())

    def close(self) -> None:
        with self.process:
            assert self.process.stdin is not None
            self.process.stdin.close()
