"""The pytest plugin, run on sample projects."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch._dynamo  # noqa: F401

# The inner runs undo their imports; what cannot be imported twice is imported here, and dynamo above.
import regard
import regard.cli.targets  # noqa: F401

pytest_plugins = ["pytester"]

MODULE = """
    import math
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self, ahead=1):
            super().__init__()
            self.ahead = ahead
            self.maps = nn.Linear(7, 21)

        def forward(self, x, mask=None):
            query, key, value = self.maps(x).chunk(3, -1)
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(self.ahead)
            scores = (query @ key.mT).masked_fill(later, -math.inf)
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None], -1e30)
            return scores.softmax(-1) @ value
"""


@pytest.fixture
def project(pytester):
    """A folder with a module to test, where unknown marks are errors."""
    pytester.makepyfile(mine_and_yours=MODULE)
    pytester.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider\npythonpath = .\n")
    return pytester


def test_each_law_is_a_test_and_a_broken_one_fails_with_its_counterexample(project):
    project.makepyfile("""
        import pytest
        from mine_and_yours import Attention

        @pytest.mark.laws(lambda: Attention(ahead=2), claims=["causality", "determinism"], seed=7, channels=7)
        def test_attention(): ...
    """)
    result = project.runpytest("-v")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_attention[[]causality[]] FAILED*",
            "*::test_attention[[]determinism[]] PASSED*",
            "*LawViolation: causality - a later token changed an earlier output.",
            "E*subject  Attention(ahead=2)",
            "E*smallest batch=1, tokens=2*",
            "E*changed  input*->*output*moved by*",
            "E*replay   check(target, channels=7, claims=*, only=*causality*, seed=7, fast=True)",
        ]
    )


def test_one_law_can_be_chosen_by_its_name(project):
    project.makepyfile("""
        import pytest
        from mine_and_yours import Attention

        @pytest.mark.laws(Attention, claims=["L1", "batch_independence", "shape"])
        def test_attention(): ...
    """)
    result = project.runpytest("-k", "causality")
    result.assert_outcomes(passed=1, deselected=2)


def test_the_body_sees_the_verdict_and_the_law_and_may_excuse_it(project):
    project.makepyfile("""
        import pytest
        from mine_and_yours import Attention

        @pytest.mark.laws(Attention(ahead=2), claims=["causality", "determinism"])
        def test_excused(verdict, law):
            assert verdict.law is law
            assert verdict.outcome == {"causality": "broken", "determinism": "holds"}[law.slug]
            if not verdict.ok:
                pytest.xfail("it looks ahead until the next version")

        @pytest.mark.laws(Attention(ahead=2), claims=["causality"])
        def test_not_excused(verdict):
            assert verdict.cases
    """)
    result = project.runpytest()
    result.assert_outcomes(passed=1, xfailed=1, failed=1)


def test_a_text_names_the_target_and_its_kind_names_the_laws(project):
    project.makepyfile("""
        import pytest

        @pytest.mark.laws("mine_and_yours:Attention(ahead=3)")
        def test_attention(): ...
    """)
    result = project.runpytest("--collect-only", "-q")
    result.stdout.fnmatch_lines(["*test_attention[[]batch-independence[]]", "*test_attention[[]determinism[]]"])


def test_a_law_that_does_not_apply_is_skipped_with_the_reason(project):
    project.makepyfile("""
        import pytest
        from mine_and_yours import Attention

        @pytest.mark.laws(Attention, claims=["cache"])
        def test_attention(): ...
    """)
    result = project.runpytest("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*cache does not apply: it has no cache*"])


def test_several_marks_and_other_parameters_live_together(project):
    project.makepyfile("""
        import pytest
        from mine_and_yours import Attention

        @pytest.fixture
        def number():
            return 3

        @pytest.mark.parametrize("word", ["a", "b"])
        @pytest.mark.laws(Attention, claims=["determinism"])
        @pytest.mark.laws(lambda: Attention(ahead=2), claims=["determinism"])
        def test_attention(number, word, law):
            assert (number, law.id) == (3, "L12")
    """)
    project.runpytest().assert_outcomes(passed=4)


def test_a_malformed_mark_is_reported_without_a_traceback(project):
    project.makepyfile("""
        import pytest

        @pytest.mark.laws("mine_and_yours:Attention", claims=["tidiness"])
        def test_attention(): ...
    """)
    result = project.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_attention: InputError: there is no law 'tidiness'.", "*instead*causality*"])
    assert "Traceback" not in result.stdout.str()


def test_the_fixture_raises_a_violation(project):
    project.makepyfile("""
        from mine_and_yours import Attention

        def test_good(assert_laws):
            assert assert_laws(Attention(), claims=["causality"]).ok

        def test_bad(assert_laws):
            assert_laws(Attention(ahead=2), claims=["causality"])
    """)
    result = project.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E*LawViolation: causality - *"])


def test_tests_without_the_mark_are_left_alone(project):
    project.makepyfile("""
        import pytest

        @pytest.fixture
        def verdict():
            return 5

        def test_own(verdict):
            assert verdict == 5
    """)
    project.runpytest().assert_outcomes(passed=1)


def test_the_mark_is_registered_and_documented(project):
    project.runpytest("--markers").stdout.fnmatch_lines(["@pytest.mark.laws(target, claims=None*"])


def test_the_plugin_alone_imports_neither_torch_nor_regard():
    program = "import sys, pytest_regard; sys.exit(bool({'torch', 'regard'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_header_names_the_laws_that_are_left_out_where_claims_were_inferred(project):
    project.makepyfile("""
        import pytest
        from mine_and_yours import Attention

        @pytest.mark.laws(lambda: Attention(ahead=2), channels=7)
        def test_inferred(): ...

        @pytest.mark.laws(lambda: Attention(ahead=2), claims=["determinism"], also=["causality"], channels=7)
        def test_claimed(): ...
    """)
    result = project.runpytest("-k", "determinism or causality")
    result.assert_outcomes(passed=2, failed=1, deselected=7)
    result.stdout.fnmatch_lines(["laws: test_inferred does not check causality, *also=* in its mark does"])
    result.stdout.no_fnmatch_line("laws: test_claimed*")


def test_a_reference_is_a_test_of_its_own(project):
    project.makepyfile("""
        import pytest
        import torch
        from mine_and_yours import Attention

        def with_the_same_weights(ahead):
            torch.manual_seed(3)
            return Attention(ahead)

        @pytest.mark.laws(
            lambda: with_the_same_weights(2), claims=["shape"], reference=lambda: with_the_same_weights(1), channels=7
        )
        def test_attention(): ...
    """)
    result = project.runpytest("-v")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*::test_attention[[]reference[]] FAILED*", "*LawViolation: reference - the values*"])
