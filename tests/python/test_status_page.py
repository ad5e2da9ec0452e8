"""The status page runs nothing but its own script: the policy's hashes are those of the page."""

import base64
import hashlib
import re
from pathlib import Path

HTTP = Path(__file__).resolve().parents[2] / "crates" / "kvdepot-server" / "src" / "http"
PAGE = (HTTP / "status.html").read_text("utf-8")


def test_the_policy_knows_script_and_style() -> None:
    source = (HTTP / "page.rs").read_text("utf-8")
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        expected = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{expected}'" in source, f"write {expected} into page.rs"


def test_nothing_comes_from_elsewhere_and_no_text_becomes_markup() -> None:
    assert not re.findall(r"""(?:src|href|action)\s*=|https?:|@import|url\(""", PAGE)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=|style=", PAGE)


def test_every_element_that_the_script_names_is_there() -> None:
    named = set(re.findall(r'(?:at|fill|draw)\("([\w-]+)"', PAGE))
    assert named
    assert named <= set(re.findall(r'id="([\w-]+)"', PAGE))
