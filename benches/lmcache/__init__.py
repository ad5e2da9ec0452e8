"""Real vLLM under LMCache's server, with kvdepot as its second level and with LMCache's own ones."""
