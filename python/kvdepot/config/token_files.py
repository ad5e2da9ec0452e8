"""Files with secrets that must not be the same."""

import os
from collections.abc import Iterator, Mapping


def token_warnings(metrics_token_file: str | None, others: Mapping[str, str | None]) -> Iterator[str]:
    """Yields a warning for each other secret that is in the same file as that of ``metrics_port``.

    Args:
        metrics_token_file: file with the secret of ``metrics_port``; ``None`` = it has none.
        others: files with secrets that permit reading and writing blocks, by the keys or options that name them.
    """
    if metrics_token_file is None:
        return
    for name, file in others.items():
        if file is not None and os.path.realpath(file) == os.path.realpath(metrics_token_file):
            yield (
                f"metrics_token_file: {metrics_token_file} is also the {name}: clients send it to metrics_port "
                "without TLS, and whoever reads it there can read and overwrite blocks: give that port its own secret"
            )
