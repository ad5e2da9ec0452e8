"""LMCache's server with an L2 adapter, and real vLLM beside it, each in a separate process."""
