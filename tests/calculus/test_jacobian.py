"""The derivative of softmax: all 25 entries of Prince's saturated example."""

import math

import pytest
import torch

from regard.calculus import jacobian, jvp, softmax, vjp
from regard.errors import CalculusError

Z = torch.tensor([-3, 1, 100, 5, -1], dtype=torch.float64)
Y = [1.85211676951797546e-45, 1.01122149261044853e-43, 1.0, 5.52108227702853273e-42, 1.368539471173853e-44]
J = torch.tensor(
    [
        [
            1.85211676951797546e-45,
            -1.87290028416080923e-88,
            -1.85211676951797546e-45,
            -1.02256890711730341e-86,
            -2.53469490430835512e-89,
        ],
        [
            -1.87290028416080923e-88,
            1.01122149261044853e-43,
            -1.01122149261044853e-43,
            -5.58303706100188676e-85,
            -1.38389652673673753e-87,
        ],
        [
            -1.85211676951797546e-45,
            -1.01122149261044853e-43,
            5.63774193777083409e-42,
            -5.52108227702853273e-42,
            -1.368539471173853e-44,
        ],
        [
            -1.02256890711730341e-86,
            -5.58303706100188676e-85,
            -5.52108227702853273e-42,
            5.52108227702853273e-42,
            -7.55581901971196036e-86,
        ],
        [
            -2.53469490430835512e-89,
            -1.38389652673673753e-87,
            -1.368539471173853e-44,
            -7.55581901971196036e-86,
            1.368539471173853e-44,
        ],
    ],
    dtype=torch.float64,
)


def assert_all_entries(matrix):
    worst = ((matrix - J) / J).abs().max().item()
    assert worst <= 1e-14, f"relative error {worst:.1e}"


def test_the_weights_of_the_saturated_example_have_fifteen_digits():
    torch.testing.assert_close(softmax(Z), torch.tensor(Y, dtype=torch.float64), rtol=1e-14, atol=0)


def test_all_25_entries_are_right_to_1e_14():
    assert_all_entries(jacobian(Z))


def test_the_textbook_formula_is_rejected():
    y = softmax(Z)
    textbook = y.diag() - y[:, None] * y
    assert textbook[2, 2] == 0
    with pytest.raises(AssertionError, match="relative error 1"):
        assert_all_entries(textbook)


def test_rows_and_columns_sum_to_zero_and_the_matrix_is_symmetric():
    matrix = jacobian(Z)
    assert (matrix == matrix.mT).all()
    assert (matrix.sum(-1).abs() <= 1e-15 * matrix.abs().sum(-1)).all()
    assert (matrix.sum(-2).abs() <= 1e-15 * matrix.abs().sum(-2)).all()


def test_eigenvalues_norm_and_largest_entry_of_the_saturated_example():
    matrix = jacobian(Z) * 1e41  # out of the range where LAPACK rounds to zero
    values = torch.linalg.eigvalsh(matrix)
    expected = torch.tensor([0, 2.2905e-4, 1.8090e-3, 1.5382e-2, 1.11012809], dtype=torch.float64)
    torch.testing.assert_close(values, expected, rtol=5e-5, atol=1e-15)
    assert values[-1].item() == pytest.approx(1.11012809, rel=5e-9)
    assert matrix.norm().item() == pytest.approx(1.1102361546732483, rel=1e-14, abs=0)
    assert matrix.abs().max().item() == pytest.approx(0.56377419377708341, rel=1e-14, abs=0)


def test_float32_keeps_the_subnormal_weights_and_loses_their_products():
    y = softmax(Z.float())
    assert (y * 2.0**127).tolist() == [k * 2.0**-22 for k in (1, 72, 2**149, 3940, 10)]
    matrix = jacobian(Z.float())
    others = [0, 1, 3, 4]
    assert all(matrix[i, j] == 0 for i in others for j in others if i != j)
    assert matrix[2, 2] > 5.6e-42


def test_two_equal_scores_by_hand():
    # y = (1/2, 1/2): J = beta [[1/4, -1/4], [-1/4, 1/4]], spectral norm beta/2, the largest there is.
    matrix = jacobian(torch.zeros(2, dtype=torch.float64), beta=3.0)
    assert matrix.tolist() == [[0.75, -0.75], [-0.75, 0.75]]
    assert torch.linalg.matrix_norm(matrix, 2).item() == pytest.approx(1.5, rel=1e-15, abs=0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 2.0, -5.0])
def test_the_spectral_norm_never_exceeds_half_of_beta(beta):
    scores = 2 * torch.randn(101, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    norms = torch.linalg.matrix_norm(jacobian(scores, beta), 2)
    assert (norms <= abs(beta) / 2 + 1e-15).all()


@pytest.mark.parametrize("beta", [1.0, -0.7, 0.0])
def test_the_matrix_is_the_derivative_autograd_finds(beta):
    scores = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    found = torch.func.vmap(torch.func.jacrev(lambda z: softmax(z, beta)))(scores)
    torch.testing.assert_close(jacobian(scores, beta), found, rtol=0, atol=1e-15)


def test_hidden_keys_have_zero_rows():
    matrix = jacobian(torch.tensor([0.0, -math.inf, 0.0]))
    assert matrix.tolist() == [[0.25, 0, -0.25], [0, 0, 0], [-0.25, 0, 0.25]]
    assert (jacobian(torch.full((3,), -math.inf)) == 0).all()


@pytest.mark.parametrize("product", [jvp, vjp])
def test_products_equal_the_matrix_without_building_it(product):
    generator = torch.Generator().manual_seed(13)
    scores = torch.randn(2, 3, 7, dtype=torch.float64, generator=generator)
    vector = torch.randn(2, 3, 7, dtype=torch.float64, generator=generator)
    expected = (jacobian(scores, 1.3) @ vector[..., None]).squeeze(-1)
    torch.testing.assert_close(product(scores, vector, 1.3), expected, rtol=0, atol=1e-15)


def test_products_stay_accurate_in_the_saturated_example():
    columns = torch.stack([jvp(Z, unit) for unit in torch.eye(5, dtype=torch.float64)])
    assert_all_entries(columns)
    vector = torch.tensor([2.0, 3, 5, 7, 11], dtype=torch.float64)
    # Row 3 by hand: sum over j != 3 of y_3 y_j (t_3 - t_j).
    by_hand = sum(Y[j] * (5 - vector[j].item()) for j in (0, 1, 3, 4))
    assert jvp(Z, vector)[2].item() == pytest.approx(by_hand, rel=1e-14, abs=0)


def test_products_and_matrix_are_themselves_differentiable():
    generator = torch.Generator().manual_seed(17)
    scores = torch.randn(2, 5, dtype=torch.float64, generator=generator).requires_grad_()
    vector = torch.randn(2, 5, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda z, t: jvp(z, t, -0.6), (scores, vector))
    assert torch.autograd.gradcheck(lambda z: jacobian(z, 1.4), scores)


def test_a_tensor_of_betas_meets_the_right_rows():
    scores, betas = torch.randn(3, 5), torch.tensor([0.5, 1.0, -2.0])[:, None]
    vector = torch.randn(3, 5)
    for row in range(3):
        beta = betas[row].item()
        torch.testing.assert_close(jacobian(scores, betas)[row], jacobian(scores[row], beta))
        torch.testing.assert_close(jvp(scores, vector, betas)[row], jvp(scores[row], vector[row], beta))


def test_products_can_be_mapped_and_compiled():
    scores, vector = torch.randn(3, 5), torch.randn(3, 5)
    expected = jvp(scores, vector, 0.3)
    torch.testing.assert_close(torch.func.vmap(lambda z, t: jvp(z, t, 0.3))(scores, vector), expected)
    compiled = torch.compile(lambda z, t: jvp(z, t, 0.3), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(scores, vector), expected)


def test_infinite_beta_has_no_derivative():
    with pytest.raises(CalculusError, match="jacobian has no value at infinite beta"):
        jacobian(torch.zeros(3), math.inf)
