"""Real vLLM with kvdepot, without, and with its own offloading, measured in the same minutes."""
