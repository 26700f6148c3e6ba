"""The HTML page of a report: complete, self-contained, escaped, and with the right cells coloured."""

from __future__ import annotations

import re

import pytest
import torch
from html_reader import Reader

from regard.laws import LAWS, Counterexample, Report, Verdict, Verdicts
from regard.laws.page import equation
from regard.laws.picture import draw


def counterexample(**fields) -> Counterexample:
    given = {"case": {"batch": 2, "tokens": 3}, "changed": "input[:, 2]", "place": "output[0, 1]"}
    return Counterexample(**{**given, "moved": 0.5, "bound": 1e-6, "precision": "float64", **fields})


def page(*verdicts: Verdict, subject: str = "Attention(dim=7)", **fields) -> str:
    return Report(subject, "layer", Verdicts(verdicts), 3, **fields).to_html()


def broken(slug: str = "causality", **fields) -> Verdict:
    law = next(law for law in LAWS if law.slug == slug)
    return Verdict(law, "broken", "Attention(dim=7)", counterexample=counterexample(**fields), cases=5)


def cells(figure: str) -> list[str]:
    """The classes of the cells, in the order in which they are drawn."""
    return re.findall(r'<rect [^>]*class="([^"]*)"', figure)


def test_a_page_is_well_formed_and_needs_nothing_else(tmp_path):
    text = page(broken(touched=torch.ones(2, 3).bool(), map=torch.rand(2, 3)))
    read = Reader(text)
    assert {tag for tag, _ in read.tags} & {"script", "img", "iframe"} == set()
    for tag, attributes in read.tags:
        assert not {"src", "onclick"} & set(attributes), tag
        assert (attributes.get("href") or "#").startswith("data:" if tag == "link" else "#")
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text
    report = Report("f", "layer", Verdicts([broken()]))
    assert report.to_html(tmp_path / "page.html") == (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_page_suits_a_phone_and_the_night():
    text = page(broken())
    assert 'name="viewport"' in text
    assert "@media (max-width" in text
    assert "prefers-color-scheme: dark" in text


def test_user_text_is_escaped():
    evil = "<script>alert('&')</script>"
    verdict = broken(place=f"{evil}[0, 0]", changed=evil, case={evil: evil}, effect="", map=torch.ones(1, 2))
    silent = Verdict(LAWS[1], "not applicable", reason=evil, measured=evil)
    text = page(verdict, silent, subject=evil, declared=evil, command=evil)
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 6
    assert evil in Reader(text).words


def test_every_law_has_a_row_and_every_violation_its_statement():
    verdicts = [broken(), *(Verdict(law, "holds", cases=11) for law in LAWS if law.slug != "causality")]
    read = Reader(page(*verdicts))
    assert sum(tag == "tr" for tag, _ in read.tags) == 1 + len(LAWS)
    (section,) = [attributes for tag, attributes in read.tags if tag == "section"]
    assert section["id"] == "causality"
    assert ("a", {"href": "#causality"}) in read.tags
    for law in LAWS:
        assert law.statement in read.words
    assert "output[0, 1] moved by 5.0e-01, bound 1.0e-06" in read.words
    assert 'check(target, only=["causality"], seed=3)' in read.words


def test_a_probe_reports_no_violations():
    verdict = broken()
    verdict.claimed = False
    text = page(verdict, probing=True)
    assert "Nothing was claimed" in text
    assert 'class="broken"' not in text
    assert verdict.law.headline not in text


def test_an_equation_has_its_indices_lowered_and_is_escaped():
    assert equation("y_{<=t}(x') = a_i => b") == "y<sub>≤t</sub>(x') = a<sub>i</sub> ⇒ b"
    assert equation("sum_j A_ij") == "sum<sub>j</sub> A<sub>ij</sub>"
    assert equation("need_weights") == "need_weights"
    assert equation("<b>") == "&lt;b&gt;"


# Pictures


def test_the_picture_shows_what_was_changed_what_moved_and_what_was_free_to():
    moved = torch.tensor([[0.0, 0.5, 0.0], [1e-9, torch.inf, 0.0]])
    where = torch.tensor([[True, True, False], [True, True, False]])
    touched = torch.tensor([[False, False, True], [False, False, True]])
    (figure,) = draw(counterexample(map=moved, where=where, touched=touched))
    still, changed = ["still", "still", "touched"], "touched"
    assert cells(figure) == [*still, *still, "still", "broken", "free", "still", "broken", "free"]
    assert changed in figure
    assert "moved by 5.0e-01" in figure
    assert "no number" in figure


def test_a_larger_movement_is_darker():
    (figure,) = draw(counterexample(map=torch.tensor([[1e-5, 1e-3, 1e-1]])))
    shades = [float(shade) for shade in re.findall(r'fill-opacity="([\d.]+)"', figure)]
    assert shades == sorted(shades)
    assert len(set(shades)) == 3
    assert shades[-1] == 1


def test_every_movement_counts_where_every_bit_should_agree():
    (figure,) = draw(counterexample(map=torch.tensor([[0.0, 1e-30, 0.0]]), bound=0.0))
    assert cells(figure) == ["still", "broken", "still"]


def test_tokens_keep_their_own_numbers():
    (figure,) = draw(counterexample(map=torch.tensor([[0.5, 0.0]]), tokens=[11, 4], row=3))
    assert re.findall(r'class="tick">(\d+)<', figure) == ["11", "4"]
    assert "batch 3" in figure


def test_many_tokens_are_drawn_in_groups_and_none_that_moved_is_lost():
    moved = torch.zeros(1, 1009)
    moved[0, 1000] = 0.5
    (figure,) = draw(counterexample(map=moved))
    assert len(cells(figure)) <= 140
    assert cells(figure).count("broken") == 1
    assert "One cell is 8 tokens" in figure


def test_two_patterns_are_drawn_side_by_side_and_their_difference_is_framed():
    expected = torch.ones(3, 5).tril(2).bool()
    actual = torch.ones(3, 5).tril(3).bool()
    (figure,) = draw(counterexample(extra={"pattern_expected": expected, "pattern_actual": actual}))
    drawn = cells(figure)
    assert len(drawn) == 2 * 15
    framed = [place for place, style in enumerate(drawn) if "differs" in style]
    assert framed == [15 + 3, 15 + 9]


def test_weights_are_drawn_as_the_head_that_differs_most():
    expected = torch.full((1, 3, 2, 5), 1 / 5)  # batch query head key
    actual = expected.clone()
    actual[0, 2, 1, 0] = 1.0
    (figure,) = draw(counterexample(place="weights[0, 2]", expected=expected, actual=actual, map=torch.zeros(1, 3)))
    assert len(cells(figure)) == 2 * 15
    assert [place for place, style in enumerate(cells(figure)) if "differs" in style] == [15 + 10]


def test_pairs_that_were_found_by_changing_one_token_at_a_time_are_a_matrix_too():
    expected = torch.ones(2, 3, 3).tril()
    actual = expected.clone()
    actual[1, 0, 2] = 1.0
    (figure,) = draw(counterexample(expected=expected, actual=actual, map=torch.zeros(2, 3), bound=0.0))
    assert [place for place, style in enumerate(cells(figure)) if "differs" in style] == [9 + 2]


@pytest.mark.parametrize("fields", [{}, {"map": torch.zeros(0, 3)}, {"touched": torch.ones(2, 3, 5)}])
def test_a_counterexample_without_a_picture_has_text_only(fields):
    assert draw(counterexample(**fields)) == []
    Reader(page(broken(**fields)))
