"""Parsing and running of pages, and that a wrong number in one fails."""

from __future__ import annotations

import numpy
import pytest
import torch

from regard.book import load_page, parse_page, run_page
from regard.book.execution import Output
from regard.book.library import list_page_ids, sort_key
from regard.book.page import Code, Prose
from regard.errors import InputError, PageError

HEAD = "---\nid: udl-0.0\ntitle: A page\ntopic: counts\nsource: Nobody, problem 0\n---\n"
PAGE = (
    HEAD
    + """
There are {{ weights }} weights; a third is {{ weights / 3:.1f }} and the first of a list {{ [5, 6][0:1] }}.

```python
width = 4
weights = 3 * width**2
print("a line")
weights + 1
```

```python check
assert weights == 48
```

```sh
regard problem
```
"""
)


def run(text: str):
    return run_page(parse_page(text, "page.md"))


def test_a_page_is_prose_and_blocks_in_order():
    page = parse_page(PAGE)
    assert (page.id, page.title, page.topic, page.source, page.slow) == (
        "udl-0.0",
        "A page",
        "counts",
        "Nobody, problem 0",
        False,
    )
    prose, block, check, shell = page.parts
    assert isinstance(prose, Prose)
    assert isinstance(block, Code)
    assert block.source.startswith("width = 4")
    assert PAGE.split("\n")[block.line - 1] == "width = 4"
    assert check.hidden
    assert not block.hidden
    assert "regard problem" in shell.text


def test_values_are_filled_in_and_outputs_are_captured():
    executed = run(PAGE)
    assert executed.parts[0].text == "There are 48 weights; a third is 16.0 and the first of a list [5]."
    assert executed.parts[1][1:3] == ("a line", "49")
    assert executed.namespace["weights"] == 48


def test_a_wrong_number_fails_with_its_line_and_both_values():
    wrong = PAGE.replace("assert weights == 48", "assert weights == width + 45")
    with pytest.raises(PageError) as caught:
        run(wrong)
    line = wrong.split("\n").index("assert weights == width + 45") + 1
    assert f"page.md:{line}" in str(caught.value)
    assert "weights is 48" in str(caught.value)
    assert "width + 45 is 49" in str(caught.value)
    assert isinstance(caught.value, AssertionError)


def test_a_block_that_raises_and_a_value_that_does_not_exist_fail():
    with pytest.raises(PageError, match="ZeroDivisionError"):
        run(PAGE.replace("width = 4", "width = 4 / 0"))
    with pytest.raises(PageError, match="wieghts"):
        run(PAGE.replace("{{ weights }}", "{{ wieghts }}"))
    with pytest.raises(PageError, match="SyntaxError"):
        run(PAGE.replace("width = 4", "width = = 4"))


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("no front matter", "begin with fields"),
        (HEAD.replace("topic: counts\n", ""), "topic is missing"),
        (HEAD.replace("topic", "tpoic"), "tpoic"),
        (HEAD.replace("udl-0.0", "UDL 0"), "lower-case"),
        (HEAD + "```python\nx = 1\n", "not closed"),
        (HEAD + "```python chekc\nx = 1\n```\n", "chekc"),
    ],
)
def test_a_page_that_cannot_be_parsed_says_why(broken, named):
    with pytest.raises(PageError, match=named):
        parse_page(broken)


FIGURES = {
    "drawing": "import regard\nregard.Causal().draw(5)",
    "text": "'<svg xmlns=\"http://www.w3.org/2000/svg\"></svg>'",
    "matplotlib": "from matplotlib.figure import Figure\nf = Figure()\nf.subplots().plot([1, 2])\nf",
    "picture": "import regard\nregard.show(regard.Causal(), 5)",
}


@pytest.mark.parametrize("kind", FIGURES)
def test_a_block_that_ends_with_a_figure_shows_it(kind):
    (output,) = run(HEAD + f"```python\n{FIGURES[kind]}\n```\n").parts
    assert isinstance(output, Output)
    assert output.svg.startswith("<svg")
    assert output.svg.endswith("</svg>")
    assert "\n\n" not in output.svg
    assert not output.result


def test_pages_start_from_the_same_seed_and_leave_no_state_behind():
    text = HEAD + "```python\nimport torch, numpy\ntorch.set_default_dtype(torch.float64)\n"
    text += "torch.rand(1).item(), numpy.random.rand()\n```\n"
    torch.manual_seed(7)
    numpy.random.seed(7)
    before = torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    first, second = run(text), run(text)
    assert first.parts[0].result == second.parts[0].result
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == numpy.random.get_state()[1].tolist()


def test_pages_are_found_by_id_and_a_near_id_is_named(tmp_path):
    for name in ("udl-12.9", "udl-12.10", "bis-12.2"):
        (tmp_path / f"{name}.md").write_text(PAGE.replace("udl-0.0", name))
    assert list_page_ids(tmp_path) == ["bis-12.2", "udl-12.9", "udl-12.10"]
    assert load_page("UDL-12.9", tmp_path).id == "udl-12.9"
    with pytest.raises(InputError, match=r"udl-12\.9"):
        load_page("udl-129", tmp_path)
    (tmp_path / "udl-12.9.md").write_text(PAGE)
    (tmp_path / "nyu-1.md").write_text(PAGE)
    with pytest.raises(InputError, match="name of its file"):
        load_page("nyu-1", tmp_path)


def test_ids_are_sorted_by_source_and_number():
    ids = ["eth-a1", "nyu-1.3b", "nyu-1.1a", "udl-12.10", "udl-12.2", "bis-12.4", "ttic-1", "ttic-1a", "eth-q2"]
    assert sorted(ids, key=sort_key) == [
        "bis-12.4", "udl-12.2", "udl-12.10", "nyu-1.1a", "nyu-1.3b", "ttic-1", "ttic-1a", "eth-a1", "eth-q2",
    ]  # fmt: skip
