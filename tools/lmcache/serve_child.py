"""vLLM's own command line, with what LMCache's connector needs on a CPU.

Run as ``-m tools.lmcache.serve_child serve …``. The engine's process imports this module, too, so the preparation
happens at import.
"""

from tools.lmcache.connector import look_past_libraries

look_past_libraries()


def main() -> None:
    """Runs vLLM's command line."""
    from vllm.entrypoints.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
