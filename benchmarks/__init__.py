"""Ours and peers side by side, in one run. `python -m benchmarks.window` (or `make bench`)."""
