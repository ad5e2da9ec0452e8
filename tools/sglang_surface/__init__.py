"""The part of SGLang that kvdepot's faces use, for each release: read from SGLang's sources, which are never run.

``python -m tools.sglang_surface WHEEL…`` writes one table per release into ``tests/python/engines/sglang_surface``. The
tests check both faces against every table (``test_sglang_releases.py``), and say which releases each face fits.
"""
