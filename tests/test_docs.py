"""The snippets of docs/ run as they stand, one page's in one program."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PAGES = ["model.md", "sharding.md", "training.md"]


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page):
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert snippets
    exec(compile("\n".join(snippets), page, "exec"), {"__name__": page})


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)", (DOCS / page).read_text())
    for link in links:
        assert "://" in link or (DOCS / link).exists(), link
