"""kvdepot beside other stores: the same blocks, the same machine, the same minutes, each side in its own processes."""
