"""The part of vLLM that the connector uses, for each release: read from vLLM's sources, which are never run.

``python -m tools.vllm_surface WHEEL…`` writes one table per release into ``tests/python/engines/vllm_surface``. The
tests check the connector against every table (``test_vllm_releases.py``), so a use of a name that a release lacks fails
without that release.
"""
