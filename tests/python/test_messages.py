"""The messages that docs/operate.md explains are those that kvdepot prints."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operate.md").read_text("utf-8")
HEADING = "## Messages, and what to do\n"


def explained() -> list[str]:
    section = PAGE.split(HEADING)[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


@pytest.fixture(scope="module")
def source() -> str:
    """All code, with each message on one line."""
    files = [*sorted((ROOT / "python").rglob("*.py")), *sorted((ROOT / "crates").glob("*/src/**/*.rs"))]
    text = "\n".join(file.read_text("utf-8") for file in files)
    joined = re.sub(r"\\\n\s*", "", text)
    return re.sub(r'"\s*\n\s*f?"', "", joined)


def test_there_are_messages_in_order() -> None:
    assert len(explained()) > 20
    assert explained() == sorted(explained())


@pytest.mark.parametrize("message", explained())
def test_an_explained_message_is_one_that_kvdepot_prints(message: str, source: str) -> None:
    pattern = r"[^\n]{1,60}?".join(re.escape(part) for part in message.split("…"))
    assert re.search(pattern, source), "change docs/operate.md with the message"
