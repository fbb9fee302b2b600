"""Side-by-side measurements: `make bench` runs all, `python -m benchmarks.NAME` one. What counts are the ratios."""
