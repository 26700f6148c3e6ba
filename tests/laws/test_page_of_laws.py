"""docs/laws.md agrees with the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard.laws import LAWS, Law

PAGE = (Path(__file__).parents[2] / "docs" / "laws.md").read_text(encoding="utf-8")


def section(law: Law) -> str:
    return PAGE.split(f"\n### {law.id} {law.slug}\n", 1)[1].split("\n### L", 1)[0]


def test_there_are_twenty_three_laws_in_order_with_names_of_their_own():
    assert [law.id for law in LAWS] == [f"L{number}" for number in range(1, 24)]
    assert len({law.slug for law in LAWS}) == 23


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.slug)
def test_the_page_has_each_law_with_its_equation_what_it_catches_and_an_example(law: Law):
    text = section(law)
    assert f"    {law.equation}\n" in text
    assert law.statement in text
    assert law.catches in text
    assert f'claims=["{law.slug}"' in text or f'"{law.slug}"]' in text
    assert f'assert "{law.slug}" in ' in text
