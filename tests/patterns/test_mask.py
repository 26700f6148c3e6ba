"""A boolean tensor as a pattern: every backend agrees with the definition, per batch row and per head."""

import pytest
import torch
from agreement import refused
from catalog import assert_agree, bounds, make_bias, results, tensors
from torch.nn.functional import scaled_dot_product_attention

from regard import (
    Attention,
    Causal,
    CostError,
    Full,
    Mask,
    Padding,
    PatternError,
    ShapeError,
    Strided,
    Window,
    attend,
    cost,
    explain,
    plan,
    weights,
)
from regard.backends import BACKENDS
from regard.layers import MultiHeadAttention

QUERIES, KEYS, HEADS, BATCH = 11, 13, 3, 2
SHAPES = [
    (QUERIES, KEYS),
    (HEADS, QUERIES, KEYS),
    (BATCH, 1, QUERIES, KEYS),
    (BATCH, HEADS, QUERIES, KEYS),
    (BATCH, HEADS, 1, KEYS),
    (BATCH, 1, 1, KEYS),
    (1, KEYS),
    (QUERIES, 1),
    (1, HEADS, QUERIES, 1),
]
SOFT = [backend.name for backend in BACKENDS if backend.name not in ("linear", "positional", "sdpa")]


def draw(shape, seed=0):
    """A mask in which the fourth query, where there are several, sees nothing."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    if shape[-2] > 3:
        mask[..., 3, :] = False
    return mask


def by_hand(query, key, value, mask):
    """The definition, with rows that see nothing as zeros."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    weight = torch.where(mask.any(-1, keepdim=True), scores, 0.0).softmax(-1)
    return torch.where(mask, weight, 0.0) @ value


@pytest.mark.parametrize("backend", SOFT)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_backend_agrees_with_the_definition(monkeypatch, shape, backend):
    # computed without being traced; tests/backends/test_flex.py has it traced
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    for dtype, kv_heads in ((torch.float64, HEADS), (torch.float32, 1)):
        inputs = tensors((QUERIES, KEYS), kv_heads=kv_heads, dtype=dtype)
        truth = tensors((QUERIES, KEYS), kv_heads=kv_heads)
        if backend == "flex":  # it has no gradients on a CPU
            inputs, truth = ([tensor.detach() for tensor in each] for each in (inputs, truth))
        mask = draw(shape)
        expected = results(by_hand, *truth, mask=mask)
        found = results(attend, *inputs, mask=mask, backend=backend)
        assert_agree(found, expected, bounds(*truth, None, dtype))
        if shape[-2] > 1:
            assert not found[0][:, :, 3].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_mask_joins_the_pattern(shape):
    inputs = tensors((QUERIES, KEYS))
    mask, pattern = draw(shape), Causal() & Padding([KEYS, 7])
    both = mask & pattern.matrix(QUERIES, KEYS)[:, None]
    expected = results(by_hand, *inputs, mask=both)
    for words in ({"pattern": pattern, "mask": mask}, {"pattern": pattern & Mask(mask)}):
        for backend in ("reference", "blocked", "auto"):
            found = results(attend, *inputs, backend=backend, **words)
            assert_agree(found, expected, bounds(*inputs, None, torch.float64))
    joined = attend(*inputs, Attention(pattern=pattern), mask=mask)
    torch.testing.assert_close(joined, expected[0])
    torch.testing.assert_close(weights(*inputs[:2], pattern=pattern, mask=mask) > 0, both.expand(BATCH, HEADS, -1, -1))


@pytest.mark.parametrize("backend", ["blocked", "native", "auto"])
@pytest.mark.parametrize("name", ["alibi", "table", "transformer-xl"])
def test_a_mask_for_each_head_runs_with_every_kind_of_bias(name, backend):
    inputs, bias = tensors((QUERIES, KEYS)), make_bias(name, HEADS, 5)
    mask = draw((HEADS, QUERIES, KEYS))
    expected = results(attend, *inputs, mask=mask, bias=bias, backend="reference")
    found = results(attend, *inputs, mask=mask, bias=bias, backend=backend)
    assert_agree(found, expected, bounds(*inputs, None, torch.float64))
    apart = [attend(*inputs, mask=mask[head], bias=bias, backend="reference")[:, head] for head in range(HEADS)]
    torch.testing.assert_close(found[0], torch.stack(apart, 1))


@pytest.mark.parametrize("scale", [0.0, float("inf")])
@pytest.mark.parametrize("shape", [(HEADS, QUERIES, KEYS), (BATCH, HEADS, QUERIES, KEYS)], ids=str)
def test_the_limits_of_temperature_take_a_mask_for_each_head(shape, scale):
    inputs = tensors((QUERIES, KEYS), kv_heads=1)
    expected = results(attend, *inputs, mask=draw(shape), scale=scale, backend="reference")
    assert_agree(
        results(attend, *inputs, mask=draw(shape), scale=scale), expected, bounds(*inputs, scale, torch.float64)
    )


@pytest.mark.parametrize("shape", [(BATCH, 1, 1, KEYS), (BATCH, HEADS, 1, KEYS), (HEADS, 1, KEYS)], ids=str)
def test_linear_attention_takes_masks_that_hide_keys(shape):
    inputs = tensors((QUERIES, KEYS))
    for pattern in (None, Causal()):
        words = {"pattern": pattern, "mask": draw(shape), "feature_map": "elu1"}
        expected = results(attend, *inputs, backend="reference", **words)
        found = results(attend, *inputs, backend="linear", **words)
        assert_agree(found, expected, bounds(*inputs, None, torch.float64))


@pytest.mark.parametrize("shape", [(1, KEYS), (HEADS, 1, KEYS), (BATCH, HEADS, 1, KEYS)], ids=str)
@pytest.mark.parametrize("whole", [True, False])
def test_one_query_sees_what_its_mask_shows(shape, whole):
    """The first kind is an interval, which the decode kernel reads; the other has gaps."""
    query, key, value = (tensor.detach() for tensor in tensors((1, KEYS)))
    mask = (torch.arange(KEYS) < 7).expand(shape) if whole else draw(shape)
    expected = by_hand(query, key, value, mask)
    torch.testing.assert_close(attend(query, key, value, mask=mask), expected)


def test_a_mask_is_what_torch_takes_by_that_name():
    query, key, value = (tensor.detach() for tensor in tensors((QUERIES, KEYS)))
    for shape in SHAPES:
        mask = draw(shape) | (torch.arange(shape[-1]) == 0)
        theirs = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        torch.testing.assert_close(attend(query, key, value, mask=mask), theirs)


def test_several_batch_axes_broadcast():
    query, key, value = torch.randn(3, 2, 5, HEADS, 7, 4, dtype=torch.float64)
    for shape in ((5, 1, 7, 7), (2, 1, 1, 7, 7), (2, 1, HEADS, 1, 7), (2, 5, HEADS, 7, 7)):
        mask = draw(shape)
        expected = attend(query, key, value, bias=torch.zeros(shape).masked_fill(~mask, -torch.inf))
        torch.testing.assert_close(attend(query, key, value, mask=mask), expected)


def test_a_mask_without_holes_is_dense_attention():
    inputs = tensors((QUERIES, KEYS))
    assert Mask(torch.ones(QUERIES, KEYS, dtype=torch.bool)).is_full
    everything = torch.ones(BATCH, HEADS, QUERIES, KEYS, dtype=torch.bool)
    assert_agree(
        results(attend, *inputs, mask=everything), results(attend, *inputs), bounds(*inputs, None, torch.float64)
    )


# The value


def test_a_mask_keeps_its_own_bits():
    tensor = draw((5, 7))
    before, mask = tensor.clone(), Mask(tensor)
    plan(mask, 5, 7)
    tensor.fill_(True)
    assert torch.equal(mask.matrix(5, 7), before)
    assert mask == Mask(before)
    assert hash(mask) == hash(Mask(before))
    assert mask != Mask(tensor)
    assert Mask(before) != Mask(before[None, None, :, :].expand(2, 1, 5, 7))
    query, key, value = (x.detach() for x in tensors((5, 7)))
    first = attend(query, key, value, mask=before)
    changed = attend(query, key, value, mask=before.logical_not_())
    assert not torch.allclose(first, changed)
    torch.testing.assert_close(changed, by_hand(query, key, value, before))


def test_equal_masks_share_one_plan():
    assert plan(Mask(draw((5, 7))), 5, 7) is plan(Mask(draw((5, 7))), 5, 7)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_its_pairs_are_counted_exactly(shape):
    tensor = draw(shape)
    mask = Mask(tensor)
    whole = tensor.expand(*tensor.shape[:-2], QUERIES, KEYS)
    assert mask.pairs(QUERIES, KEYS) == int(whole.sum())
    assert (~mask).pairs(QUERIES, KEYS) == int((~whole).sum())
    both = whole & Causal().matrix(QUERIES, KEYS)
    assert (Causal() & mask).pairs(QUERIES, KEYS) == int(both.sum()) == plan(Causal() & mask, QUERIES, KEYS).pairs
    either = whole | Strided(3).matrix(QUERIES, KEYS)
    assert (mask | Strided(3)).pairs(QUERIES, KEYS) == int(either.sum())
    assert mask.density(QUERIES, KEYS) == int(whole.sum()) / whole.numel()
    assert torch.equal(mask.matrix(QUERIES, KEYS).reshape(whole.shape), whole)


def test_its_query_and_key_axes_are_the_queries_and_keys():
    tensor = draw((3, 7))
    mask = Mask(tensor)
    assert torch.equal(mask.matrix(3, 7), tensor)
    assert torch.equal(mask.allows(torch.arange(4, 7)[:, None], torch.arange(7)), tensor)  # absolute positions
    assert not mask.allows(torch.arange(4)[:, None], torch.arange(7)).any()
    assert torch.equal((Causal() & mask).matrix(3, 7), tensor & torch.ones(3, 7).tril(4).bool())
    for lengths in ((7, 7), (3, 8), (1, 7)):
        with refused(PatternError, "Mask(shape=(3, 7))", f"{lengths[0]} queries and {lengths[1]} keys"):
            mask.matrix(*lengths)


def test_it_prints_its_shape_and_draws_itself():
    mask = Mask(draw((BATCH, HEADS, 4, 5)))
    assert repr(Causal() & ~mask) == "Causal() & ~Mask(shape=(2, 3, 4, 5))"
    assert str(mask.draw(4, 5)) == str(Mask(draw((BATCH, HEADS, 4, 5))[0, 0]).draw(4, 5))
    assert mask.draw(4, 5).caption == "batch row 0 of 2, head 0 of 3"
    assert Mask(draw((HEADS, 4, 5))).draw(4, 5).caption == "head 0 of 3"
    assert "Mask(shape=(2, 3, 4, 5))" in str(explain(*tensors((4, 5)), pattern=mask))
    heads = draw((HEADS, 4, 5))
    assert explain(*tensors((4, 5)), mask=heads).macs == BATCH * int(heads.sum()) * (5 + 7)


def test_its_cost_counts_its_pairs():
    sizes = {"tokens": QUERIES, "keys": KEYS, "dim": 5, "heads": HEADS}
    for shape in SHAPES:
        mask = draw(shape)
        pairs = int(mask.expand(BATCH, HEADS, QUERIES, KEYS).sum())
        found = cost(Attention(pattern=Mask(mask)), batch=BATCH, **sizes)
        assert int(found.macs) == pairs * 10
        for backend in ("native", "blocked"):
            assert int(cost(Attention(pattern=Mask(mask)), batch=BATCH, backend=backend, **sizes).macs) >= pairs * 10
    with refused(CostError, "heads=5", "3 heads"):
        cost(Attention(pattern=Mask(draw((HEADS, QUERIES, KEYS)))), **{**sizes, "heads": 5})


@torch.no_grad()
def test_a_layer_takes_a_mask_and_a_cache_that_grows():
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, heads=HEADS, attention=Attention(pattern=Causal())).double().eval()
    x = torch.randn(BATCH, 9, 12, dtype=torch.float64)
    for shape in ((BATCH, 1, 1, 9), (BATCH, HEADS, 9, 9)):
        mask = draw(shape) | torch.eye(9, dtype=torch.bool)[-shape[-2] :]
        whole = layer(x, pattern=Mask(mask))
        cache = layer.new_cache()
        pieces = [slice(0, 4), slice(4, 5), slice(5, 9)]
        rows = [mask[..., one, :] if mask.shape[-2] > 1 else mask for one in pieces]
        steps = [
            layer(x[:, one], cache=cache, pattern=Mask(row[..., : one.stop]))
            for one, row in zip(pieces, rows, strict=True)
        ]
        torch.testing.assert_close(torch.cat(steps, 1), whole)
    chosen = layer.weights(x, pattern=Mask(mask), queries=[2, 7])
    torch.testing.assert_close(chosen, layer.weights(x, pattern=Mask(mask))[..., [2, 7], :])


# Refusals


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(3, 4), torch.ones(3, dtype=torch.bool), [[True]], torch.ones(0, 3, 4, dtype=torch.bool), None],
    ids=["float", "one axis", "list", "no rows", "none"],
)
def test_only_boolean_tensors_are_masks(wrong):
    with refused(PatternError, "torch.as_tensor(mask).bool()"):
        Mask(wrong)


def test_masks_that_disagree_are_refused():
    with refused(PatternError, "2 batch rows", "5 on the right"):
        Padding([1, 2]) & Mask(draw((5, 1, 4, 4)))
    with refused(PatternError, "3 heads on the left"):
        Mask(draw((3, 4, 4))) | Mask(draw((5, 4, 4)))
    inputs = tensors((QUERIES, KEYS))
    with refused(ShapeError, "another number of heads", "mask[:, None]"):
        attend(*inputs, pattern=Mask(draw((5, QUERIES, KEYS))))
    with refused(ShapeError, "another batch"):
        attend(*inputs, pattern=Mask(draw((7, 1, QUERIES, KEYS))))
    with refused(ShapeError, "does not fit the scores", "mask[:, None] if it is (batch, query, key)"):
        attend(*inputs, mask=draw((BATCH, QUERIES, KEYS)))
    with refused(ShapeError, "not a boolean tensor", "bias=mask"):
        attend(*inputs, mask=draw((QUERIES, KEYS)).double())
    with refused(ShapeError, "not a boolean tensor", "torch.as_tensor(mask).bool()"):
        attend(*inputs, mask=draw((QUERIES, KEYS)).long())
    with refused(ShapeError, "not a boolean tensor"):
        attend(*inputs, mask=Full())  # type: ignore[arg-type]


def test_a_compiled_operator_takes_a_mask_in_one_graph():
    query, key, value = (tensor.detach() for tensor in tensors((QUERIES, KEYS)))
    near = Window(5, 5)
    run = torch.compile(
        lambda mask: attend(query, key, value, pattern=near, mask=mask), backend="eager", fullgraph=True
    )
    for shape in ((QUERIES, KEYS), (BATCH, HEADS, QUERIES, KEYS)):
        expected = attend(query, key, value, pattern=near, mask=draw(shape))
        torch.testing.assert_close(run(draw(shape)), expected)
