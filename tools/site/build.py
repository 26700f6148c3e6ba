"""Build the documentation as a static site: `make docs`, or python tools/site/build.py [--folder FOLDER].

The sources are written first (stage.py), then Sphinx makes the pages, then every link is followed (links.py). The site
needs no server and no network: open index.html.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))
# Pages run side by side, each on one thread; read by torch when it is imported, which is later.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def build(folder: Path, pages: list[str] | None = None, jobs: int = 2) -> list[str]:
    """Write the site into `folder`/html; returns what is wrong with its links."""
    from links import find_faults
    from stage import write_sources

    for name in ("source", "html"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "source").mkdir(parents=True)
    write_sources(folder / "source", pages, jobs)
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-W", "--keep-going", "-j", str(jobs)]
    command += ["-c", str(HERE), "-d", str(folder / "doctrees"), str(folder / "source"), str(folder / "html")]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("Sphinx has warnings, which are errors here: see above")
    return find_faults(folder / "html")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documentation as a static site.")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "site", help="(build/site)")
    parser.add_argument("--pages", metavar="ID,...", help="run these pages of the book only, for a quick look")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    args = parser.parse_args()
    start = time.monotonic()
    faults = build(args.folder.resolve(), args.pages.split(",") if args.pages is not None else None, args.jobs)
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        return 1
    files = [file for file in (args.folder / "html").rglob("*") if file.is_file()]
    size, seconds = sum(file.stat().st_size for file in files) / 1e6, time.monotonic() - start
    print(f"{args.folder / 'html' / 'index.html'}: {len(files)} files, {size:.1f} MB, {seconds:.0f} s, no broken link")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
