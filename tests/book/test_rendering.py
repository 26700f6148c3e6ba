"""Pages in a terminal, as Markdown and as HTML: formulas, code, outputs and figures."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from regard.book import list_page_ids, load_page, parse_page, run_page
from regard.book.formulas import as_mathml, as_unicode, replace_formulas
from regard.book.html import to_html
from regard.book.markdown import inline_figure, to_markdown
from regard.book.page import Prose
from regard.book.unicode_formulas import to_unicode
from regard.book.values import VALUE
from regard.errors import PageError

PAGE = r"""---
id: udl-0.0
title: Weights & "biases" < counts
topic: counts
source: Nobody
---
The scale is $\frac{1}{\sqrt{d_k}}$, `$HOME` is code, $a_i^* b_j^*$ has stars, and it costs {{ price }} $.

$$
\begin{aligned} a &= b \\ &= c \end{aligned}
$$

| N | D |
|---|---|
| 3 | 4 |

```python
price = 7
print("a < b", "```")
```

```python check
secret = 1
assert secret == 1
```

```python
import regard
regard.Causal().draw(3)
```
"""


@pytest.fixture(scope="module")
def executed():
    return run_page(parse_page(PAGE))


def test_formulas_are_found_outside_of_code():
    seen = []
    replace_formulas(
        "$a$ `$b$` $$c$$ costs 5 $ or 6 $, \\$d\\$\n```sh\necho $e $f\n```\n$x_1$-$y$",
        lambda *found: seen.append(found) or "",
    )
    assert seen == [("a", False), ("c", True), ("x_1", False), ("y", False)]


def test_html_is_one_page_with_mathml_and_figures_and_without_hidden_blocks(executed):
    html = to_html(executed)
    assert html.count("<math") == 3
    assert "<figure" in html
    assert "<table>" in html
    assert "secret" not in html
    assert "a &lt; b" in html
    assert "Weights &amp; " in html
    assert "7 $" in html
    assert "<em>" not in html  # the stars and underscores of formulas are not emphasis
    assert not re.search(r'(?:src|href)="http', html)


def test_markdown_has_code_outputs_and_figures(executed):
    text = to_markdown(executed, None, inline_figure)
    assert "````text\na < b ```\n````" in text
    assert r"$\frac{1}{\sqrt{d_k}}$" in text
    assert "secret" not in text


def test_the_terminal_has_unicode_formulas(executed):
    text = to_markdown(executed, as_unicode, lambda number, output: f"> Figure {number}")
    assert "1/√dₖ" in text.replace("\\_", "_") or "1/√(d" in text
    assert "> Figure 1" in text


def test_a_page_alone_has_no_links_to_other_pages():
    executed = run_page(parse_page(PAGE.replace("The scale is", "By [bis-12.4](bis-12.4.md) the scale is")))
    assert "By `bis-12.4` the scale" in to_markdown(executed, None, inline_figure, links=False)
    assert "[bis-12.4](bis-12.4.md)" in to_markdown(executed, None, inline_figure)
    assert "bis-12.4.md" not in to_html(executed)


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        (r"\frac{a+b}{2}", "(a+b)/2"),
        (r"x^{2n} W^\top", "x²ⁿ Wᵀ"),
        (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "[1 2; 3 4]"),
        (r"\sum_{j=1}^m e^{\beta z_j} \le \infty", "Σⱼ₌₁ᵐ e^(β zⱼ) ≤ ∞"),
        (r"\hat{y} \in \mathbb{R}^{d}", "ŷ ∈ ℝ^d"),
    ],
)
def test_latex_is_readable_as_text(latex, text):
    assert to_unicode(latex) == text


@pytest.mark.parametrize("latex", [r"\frac", r"x^{", r"\unknowncommand x"])
def test_a_formula_that_cannot_be_converted_fails(latex):
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed: pip install regard[book]")
    with pytest.raises(PageError, match="formula"):
        as_mathml(latex, False)


@pytest.mark.parametrize("latex", [r"a < b \& c", r"\begin{aligned} a &= b \\ &= c \end{aligned}", r"x'_*[1]"])
def test_mathml_is_well_formed(latex):
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed: pip install regard[book]")
    ElementTree.fromstring(as_mathml(latex, False))


def check_formula(latex: str, block: bool) -> str:
    ElementTree.fromstring(as_mathml(latex, block).strip())
    return ""


@pytest.mark.parametrize("name", list_page_ids())
def test_every_formula_of_every_page_is_well_formed(name):
    """Values are not filled in here, which takes no time: `{{ x }}` becomes a digit."""
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed: pip install regard[book]")
    for part in load_page(name).parts:
        if isinstance(part, Prose):
            replace_formulas(VALUE.sub("7", part.text), check_formula)
