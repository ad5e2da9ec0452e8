"""Benchmarks: ratios to something measured within the same minute, never absolute figures alone."""
