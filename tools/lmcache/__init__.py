"""LMCache's server with an L2 adapter, and real vLLM beside it, each a process of its own."""
