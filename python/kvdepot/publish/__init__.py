"""Publishes a depot's KV events over ZMQ in vLLM's wire format, for depots without an engine."""
