"""The documentation: links lead somewhere, and code that it quotes is in the files."""

import re

import pytest
from conftest import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def anchors(page):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quoted_lines(page):
    """A block that begins with the name of a file holds lines of it, in order."""
    for path, block in re.findall(
        r"^```\w+\n(?:#|//) (\S+/\S+)\n(.*?)```", page.read_text(), re.M | re.S
    ):
        lines = iter((ROOT / path).read_text().splitlines())
        for line in block.splitlines():
            assert line in lines, f"{path} has no line (in this order): {line}"


def test_index():
    """The table of contents lists every page."""
    text = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"}
    assert {name for name in pages if f"({name})" not in text} == set()


def test_first_program():
    """The README's program runs, and fuses forward and backward."""
    program = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    names = {}
    exec(program, names)
    (fusion,) = names["step"].remap_reports[-1].fused
    assert (fusion.rule, fusion.gradients) == ("matmul_bias_gelu_erf", 1)
