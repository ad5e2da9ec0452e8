"""Options that several commands of ``kvdepot trace`` have."""

import click

FILES = click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False))
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
BLOCK_MIB = click.option(
    "--block-mib", type=click.FloatRange(min=0, min_open=True), help="Size of a block, for sizes in GB."
)
BAR_CHARACTERS = 50
"""Length of a bar for a hit rate of 100 %."""
