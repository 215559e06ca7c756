"""The snippets of docs/ run as they stand, one page's in one program."""

import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"
PAGES = ["sharding.md"]


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page):
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert snippets
    exec(compile("\n".join(snippets), page, "exec"), {"__name__": page})
