"""Units of sizes."""

GIB = 1 << 30
BLOCK_ALIGN_BYTES = 4096
