"""Traces of requests: files of them, what caches would do with them, and load that is made from them."""
