"""kvdepot keeps the KV caches of LLM engines: dump what was computed, load it back instead of computing it again."""
