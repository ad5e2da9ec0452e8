"""The demonstration of ``make demo``: a real vLLM server with a depot; cold, warm, and after both were killed."""
