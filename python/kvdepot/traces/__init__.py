"""Traces of requests: files, replays against simulated caches, and load generated from them."""
