"""The connector's logger: under vLLM's own, so that vLLM's handlers and level apply to it."""

import logging


def connector_logger() -> logging.Logger:
    """Returns the connector's only logger."""
    return logging.getLogger("vllm.kvdepot")


def log_hit(request_id: str, total_blocks: int, hit_hbm: int, hit_external: int) -> None:
    """Logs once per request what it found and where. Operators parse this line; its words are fixed by the seeds."""
    connector_logger().info(
        "request_id: %s, total_blocks_num: %d, hit hbm: %d, hit external: %d",
        request_id,
        total_blocks,
        hit_hbm,
        hit_external,
    )
