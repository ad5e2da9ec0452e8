"""Benchmarks: ratios against something measured in the same minute, never bare figures."""
