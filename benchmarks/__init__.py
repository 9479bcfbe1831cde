"""Benchmarks: each is `python -m benchmarks.NAME [--quick] [--json]`, run from the repository."""
