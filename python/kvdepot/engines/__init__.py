"""Connectors for LLM engines: thin translations of an engine's interface into dumps, loads and claims."""
