"""No parameter of a case is shown without an explanation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.nn.functional as F
from torch import nn
from zoo.catalogue import EXHIBITS
from zoo.exhibit import Exhibit, twins

import regard
from regard.adapters import Adapter, adapt
from regard.laws import LAWS
from regard.laws.glossary import PATHS, describe, explain_value, find_term
from regard.laws.law import Case, Law
from regard.laws.reference import read_reference

TWINS = twins(EXHIBITS)
ONE_OF_EACH = list({(exhibit.law[0], exhibit.kind): exhibit for exhibit in TWINS}.values())


def subjects(exhibits: list[Exhibit]) -> Iterator[Adapter]:
    """An operator and modules that offer every sort of case: masks, caches, code paths, patterns, weights."""
    for exhibit in exhibits:
        subject = adapt(exhibit.build("twin"), exhibit.kind, **exhibit.options)
        subject.context = exhibit.claims
        yield subject
    yield adapt(regard.attend, "operator", pattern=regard.Causal())
    yield adapt(nn.MultiheadAttention(12, 3, batch_first=True))
    yield adapt(nn.TransformerEncoderLayer(12, 3, 24, batch_first=True))
    yield adapt(lambda q, k, v, attn_mask=None, fused=False: F.scaled_dot_product_attention(q, k, v, attn_mask))


def cases_of(law: Law, subject: Adapter) -> list[Case]:
    try:
        if law.applies(subject) is not None:
            return []
        return [case for fast in (True, False) for case in law.cases(subject, fast)]
    except Exception:  # some are refused before the first case
        return []


@pytest.fixture(scope="module", params=["one of each law and kind", pytest.param("all", marks=pytest.mark.slow)])
def every_case(request: pytest.FixtureRequest) -> list[tuple[str, Case]]:
    found = []
    for subject in subjects(TWINS if request.param == "all" else ONE_OF_EACH):
        laws = [*LAWS, read_reference(subject, subject, None, {})]
        found += [(law.slug, case) for law in laws for case in cases_of(law, subject)]
    return found


def test_the_cases_of_every_law_are_covered(every_case):
    assert {slug for slug, _ in every_case} == {law.slug for law in LAWS} | {"reference"}


def test_every_parameter_and_every_value_has_an_explanation(every_case):
    dumb = set()
    for slug, case in every_case:
        for key, value in case.items():
            word = find_term(slug, key)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if word is None or not (number or explain_value(word, value)):
                dumb.add((slug, key, "a number" if number else value))
    assert dumb == set()


def test_no_two_parameters_of_a_case_have_one_name(every_case):
    for slug, case in every_case:
        names = [word.name for word in describe(slug, case)]
        assert len(names) == len(set(names)), (slug, case)


def test_internal_parameter_names_are_not_shown(every_case):
    shown = {word.name for slug, case in every_case for word in describe(slug, case)}
    assert shown.isdisjoint({"used", "kept", "by", "kind", "what", "form", "side", "try"})


@pytest.mark.parametrize(
    ("path", "meaning"),
    [
        ("output_attentions=True", "called with output_attentions=True"),
        ("fused_attn turned over", "the attribute fused_attn of the module negated"),
        ("mask of (Q, K)", "a mask of shape (Q, K), against the same mask written out in full"),
        ("compiled", PATHS["compiled"]),
        ("a thing of its own", "another code path of its library: a thing of its own"),
    ],
)
def test_code_paths_that_a_subject_brings_along_are_explained_by_their_form(path: str, meaning: str):
    (said,) = describe("paths", {"path": path})
    assert (said.name, said.value, said.meaning) == ("path", path, meaning)
