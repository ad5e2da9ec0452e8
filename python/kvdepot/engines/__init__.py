"""Connectors of LLM engines: thin translations of an engine's own words into dumps, loads and claims."""
