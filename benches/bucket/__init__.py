"""Benchmark of the Object tier above a real S3 server on this machine."""
