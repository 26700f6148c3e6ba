"""Ours and peers side by side, in one run. `python -m benchmarks.attention`, `python -m benchmarks.window`."""
