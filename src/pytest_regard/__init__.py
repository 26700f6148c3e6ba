"""The laws of attention as tests: one test for each law that something claims.

    import pytest
    from mypackage import Attention

    @pytest.mark.laws(lambda: Attention(dim=24, heads=3), claims=["causality", "padding", "cache"])
    def test_attention(): ...

Each law is a test of its own: `pytest -k causality` runs that one, and a broken law fails with its smallest
counterexample.
The first argument of the mark is what `regard.check` takes, or a function without arguments that makes it, or the text
`"mypackage.attention:Attention"`; without `claims` its kind decides what it claims, and the header of the run names
the laws that are left out, which `also=["causality"]` adds. Everything else is passed on to `check`; `fast=False`
searches for longer, and `reference=` compares values with another implementation.

The function may do nothing, or take `verdict` or `law`. Its body runs first, so that it may excuse a law in words:

    @pytest.mark.laws("mypackage.attention:Attention")
    def test_attention(law):
        if law.slug == "empty-rows":
            pytest.xfail("an empty row is NaN until the next version")

The fixture `assert_laws` checks in the middle of a test:

    def test_attention(assert_laws):
        assert_laws(Attention(dim=24, heads=3), claims=["causality"])

In a project that has no tests of this kind, one line of its continuous integration does the same:

    regard check mypackage.attention:Attention --fast
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Nothing of Regard is imported before it is used: the plugin is loaded by every run of pytest beside it.

MARK = (
    "laws(target, claims=None, kind=None, seed=0, fast=True, *, also=(), reference=None, **options): "
    "one test for each law that the target claims"
)
HIDDEN = "_claim_of_regard"
# The laws that are not checked, for each test whose claims were inferred.
NOTES = pytest.StashKey[dict[str, list[str]]]()


class Claimant:
    """The target of one mark: made when it is first needed, and then shared by the tests of its laws."""

    def __init__(
        self,
        target: Any,
        claims: Any = None,
        kind: str | None = None,
        seed: int = 0,
        fast: bool = True,
        *,
        also: Any = (),
        reference: Any = None,
        **options: Any,
    ) -> None:
        self.target, self.claims, self.also, self.reference = target, claims, also, reference
        self.kind, self.seed, self.fast, self.options = kind, seed, fast, options
        self._subject: Any = None

    @property
    def subject(self) -> Any:
        if self._subject is None:
            from regard.adapters import adapt
            from regard.cli.targets import make_target

            self._subject = adapt(make_target(self.target, self.seed), self.kind, **self.options)
        return self._subject

    def laws(self) -> list[str]:
        """The slugs of the laws that are claimed; only a target that does not say has to be made for that."""
        from regard.laws.checking import find_laws
        from regard.laws.claims import infer_claims

        claims = find_laws(infer_claims(self.subject) if self.claims is None else self.claims)
        claims += find_laws(self.also) if self.also else []
        slugs = list(dict.fromkeys(law.slug for law in claims))
        return slugs if self.reference is None else [*slugs, "reference"]

    def unchecked(self) -> list[str]:
        """The laws that apply and are left out, where they were inferred: without claims, nothing says so otherwise."""
        if self.claims is not None:
            return []
        from regard.laws.checking import find_laws
        from regard.laws.unchecked import list_unchecked

        laws = find_laws([slug for slug in self.laws() if slug != "reference"])
        left_out = list_unchecked(self.subject, laws, False, True)
        return [left.slug for left in left_out if left.argument]

    def beside(self) -> Any:
        """The reference, read as the target is; None if there is none."""
        if self.reference is None:
            return None
        from regard.cli.targets import make_target
        from regard.laws.reference import read_reference

        reference = make_target(self.reference, self.seed)
        return read_reference(reference, self.subject, self.kind, dict(self.options)).subject

    def verdict(self, slug: str) -> Any:
        """The verdict on one law, and the violation if it is broken."""
        from regard.laws import check

        report = check(
            self.subject,
            claims=self.claims,
            also=self.also,
            reference=self.beside(),
            only=[slug],
            seed=self.seed,
            fast=self.fast,
        )
        report.asked |= {"kind": self.kind, **self.options}  # what the subject was made with, for the replay
        return report.verdicts[slug], next(iter(report.violations), None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = list(metafunc.definition.iter_markers("laws"))
    if not marks:
        return
    claims, names = [], []
    for number, mark in enumerate(marks):
        try:
            claimant = Claimant(*mark.args, **mark.kwargs)
            laws = claimant.laws()
        except Exception as failure:  # a mark that cannot be read is an error of the test's author, told in words
            pytest.fail(f"{metafunc.definition.name}: {type(failure).__name__}: {failure}", pytrace=False)
        if left_out := claimant.unchecked():
            notes = metafunc.config.stash.setdefault(NOTES, {})
            notes[metafunc.definition.name] = left_out
        for slug in laws:
            claims.append((claimant, slug))
            names.append(slug if len(marks) == 1 else f"{number}-{slug}")
    wanted = [HIDDEN, *(name for name in ("verdict", "law") if name in metafunc.fixturenames)]
    metafunc.fixturenames.append(HIDDEN)
    metafunc.parametrize(wanted, [(claim,) * len(wanted) for claim in claims], ids=names)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return [
        f"laws: {name} does not check {', '.join(slugs)}; also=[...] in its mark does"
        for name, slugs in config.stash.get(NOTES, {}).items()
    ]


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    given: dict[str, Any] = pyfuncitem.funcargs
    claim: Any = pyfuncitem.callspec.params.get(HIDDEN) if hasattr(pyfuncitem, "callspec") else None
    if claim is None:
        return (yield)
    claimant, slug = claim
    verdict, violation = claimant.verdict(slug)
    if verdict.outcome == "not applicable" and "verdict" not in given:
        pytest.skip(f"{slug} does not apply: {verdict.reason}")
    given.update({name: value for name, value in (("verdict", verdict), ("law", verdict.law)) if name in given})
    result = yield
    if violation is not None:
        raise violation
    return result


@pytest.fixture(name="assert_laws")
def _assert_laws() -> Callable[..., Any]:
    """`regard.laws.assert_laws`: raises a LawViolation with the smallest counterexample."""
    from regard.laws import assert_laws

    return assert_laws
