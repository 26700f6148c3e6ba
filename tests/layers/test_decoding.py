"""A layer that decodes from a cache gives the outputs of the whole text, whatever happens to the cache."""

import itertools

import pytest
import torch
from catalog import PATTERNS, TOKENS, as_of
from decoders import F64, POSITIONS, SIZES, Decoder, assert_close, assert_four_parts, random, splits

from regard import (
    Attention,
    Axial,
    Bias,
    Blocks,
    Causal,
    First,
    Full,
    RowColumn,
    Strided,
    Window,
    attend,
)
from regard.errors import CacheError, InputError
from regard.kernels import library
from regard.layers import (
    CrossCache,
    KVCache,
    MultiHeadAttention,
    Rotary,
    StateCache,
)

# Every position scheme, every pattern, every split


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("position", POSITIONS)
def test_every_position_scheme_decodes_as_the_whole_text(position, dtype):
    decoder = Decoder(position, dtype=dtype)
    x = random(3, 23, 13, dtype=dtype)
    expected = decoder.whole(x)
    for chunks in splits(23):
        assert_close(decoder.decode(x, chunks, decoder.attention.new_cache()), expected, dtype)


def test_positions_matter_in_these_tests():
    x = random(1, 23, 13)
    outputs = [Decoder(position).whole(x) for position in POSITIONS]
    for one, other in itertools.combinations(outputs, 2):
        assert float((one - other).abs().max()) > 1e-3


# A square mask fits all queries at once; tests/patterns/test_mask.py decodes with its rows.
DECODED = [p for p in PATTERNS if repr(p) != f"Mask(shape=({TOKENS}, {TOKENS}))"]
WITH_PAST = [p for p in (p if p.supports_kv_cache else Causal() & p for p in DECODED) if p.supports_kv_cache]


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("pattern", WITH_PAST, ids=repr)
def test_every_pattern_with_a_past_decodes_as_the_whole_text(pattern, dtype):
    batch = 2 if pattern.rows is None else pattern.rows
    x = random(batch, TOKENS, 13, dtype=dtype)
    position = "alibi" if dtype == F64 else "none"
    decoder = Decoder(position, None if pattern.rows is not None else pattern, dtype=dtype)
    at = None if pattern.rows is None else lambda tokens: as_of(pattern, tokens)
    expected = decoder.whole(x, at and at(TOKENS))
    # A plan is made for every new length, so that few lengths keep this quick.
    for chunks in [[3, 1, 1, 1, 9, 1, 2, 17], [20, 15]][: 1 if dtype == torch.float32 else 2]:
        assert_close(decoder.decode(x, chunks, decoder.attention.new_cache(), at), expected, dtype)


def test_almost_every_pattern_of_the_catalog_has_a_past_once_it_is_causal():
    assert len(WITH_PAST) >= len(DECODED) - 3


@pytest.mark.parametrize("scale", [0.0, -0.7, 2.3, float("inf")])
def test_every_temperature_decodes_as_the_whole_text(scale):
    decoder = Decoder("none", Window(5, 0), scale=scale)
    x = random(2, 23, 13)
    assert_close(decoder.decode(x, [4, 1, 9, 1, 8], decoder.attention.new_cache()), decoder.whole(x))


# The rolling window


ROLLING = [
    Window(0, 0),
    Window(1, 0),
    Window(4, 0),
    Causal() & Window(3, 9),
    Window(3, 0, step=2),
    Window(9, 0) & Strided(3),
    Window(2, 0) | Window(3, 0, step=4),
]


@pytest.mark.parametrize("position", ["none", "halves", "alibi", "transformer-xl"])
@pytest.mark.parametrize("pattern", ROLLING, ids=repr)
def test_a_window_rolls_on_with_the_outputs_of_the_whole_history(pattern, position):
    decoder = Decoder(position, pattern)
    x = random(2, 61, 13)
    expected = decoder.whole(x)
    for chunks in splits(61, seed=2)[1 : 5 : 1 if position == "none" else 2]:
        cache = decoder.attention.new_cache()
        assert cache.window is not None
        assert_close(decoder.decode(x, chunks, cache), expected)


@pytest.mark.parametrize("pattern", ROLLING, ids=repr)
def test_memory_is_bounded_by_the_window_whatever_the_number_of_tokens(pattern):
    decoder = Decoder("none", pattern)
    cache = decoder.attention.new_cache()
    bound = 2 * (2 * cache.window + 1) * SIZES.kv_heads * (SIZES.key + SIZES.value) * 8
    for chunk in (7, 1, 50, 1, 2, 3, 40, *[1] * 30):
        decoder.step(random(2, chunk, 13), cache)
        assert cache.bytes <= bound
        assert cache.held <= 2 * cache.window + 1
    assert cache.length == 7 + 1 + 50 + 1 + 2 + 3 + 40 + 30
    full = Decoder().attention.new_cache()
    Decoder().step(random(2, 134, 13), full)
    assert full.bytes > bound or cache.window > 60


def test_a_window_larger_than_the_capacity_is_not_rolled():
    layer = Decoder("none", Window(30, 0)).attention
    assert layer.new_cache(10).window is None
    assert layer.new_cache(100).window == 30
    assert layer.new_cache().window == 30


def test_patterns_that_count_from_the_first_token_keep_everything():
    for pattern in (Causal() & Blocks(6), Causal() & Axial((5, 7)), Window(3, 0) & First(9)):
        assert Decoder("none", pattern).attention.new_cache().window is None
    on_grid = Attention(pattern=Window(3, 0), bias=RowColumn(6, (5, 7)))
    assert MultiHeadAttention(SIZES, attention=on_grid).new_cache().window is None


class Absolute(Bias):
    """A bias that depends on the key's absolute position, which a rolling cache has to keep."""

    heads = 1

    def scores(self, query_position, key_position):
        return torch.sin(1.3 * (key_position + 0 * query_position)).to(F64)[None]


def test_a_bias_of_absolute_positions_is_never_rolled():
    layer = MultiHeadAttention(SIZES, attention=Attention(pattern=Window(3, 0), bias=Absolute())).double().eval()
    cache = layer.new_cache()
    assert cache.window is None
    x = random(2, 19, 13)
    with torch.no_grad():
        found = torch.cat([layer(chunk, cache=cache) for chunk in x.split([5, 1, 1, 9, 3], dim=1)], 1)
        assert_close(found, layer(x))


# Rows of unequal length


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("pattern", [Causal(), Window(4, 0), Causal() & Strided(3)], ids=repr)
def test_each_left_padded_row_decodes_as_that_row_alone(position, pattern):
    decoder = Decoder(position, pattern)
    lengths, prompt, more = [3, 8, 1, 5], 11, [1, 1, 6, 1, 9]  # one column more than the longest row needs
    x = random(4, prompt + sum(more), 13)
    x[0, :5] = torch.nan  # padding must not be read
    cache = decoder.attention.new_cache()
    first = decoder.step(x[:, :prompt].nan_to_num(), cache, lengths=lengths)
    rest = [decoder.step(chunk, cache) for chunk in x[:, prompt:].split(more, dim=1)]
    found = torch.cat([first, *rest], 1)
    assert cache.length == max(lengths) + sum(more)
    for row, length in enumerate(lengths):
        alone = decoder.whole(x[row : row + 1, prompt - length :])
        assert_close(found[row : row + 1, prompt - length :], alone)


@pytest.mark.parametrize("position", ["none", "halves", "pairs", "alibi"])
def test_without_a_cache_lengths_hide_the_padding_too(position):
    decoder = Decoder(position)
    x, lengths = random(3, 11, 13), torch.tensor([11, 4, 7])
    with torch.no_grad():
        found = decoder.attention(x, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        assert_close(found[row : row + 1, 11 - length :], decoder.whole(x[row : row + 1, 11 - length :]))


def test_padding_lengths_that_are_full_change_nothing():
    decoder, x = Decoder("halves"), random(2, 9, 13)
    cache = decoder.attention.new_cache()
    found = torch.cat((decoder.step(x[:, :5], cache, lengths=[5, 5]), decoder.step(x[:, 5:], cache)), 1)
    assert cache.padding is None
    assert_close(found, decoder.whole(x))


# Crop and reorder, on whole layers


@pytest.mark.parametrize("position", POSITIONS)
def test_decoding_goes_on_after_reorder_and_crop(position):
    decoder = Decoder(position)
    x, other = random(3, 17, 13), random(5, 9, 13, seed=1)
    cache = decoder.attention.new_cache()
    decoder.step(x, cache)
    cache.reorder(torch.tensor([2, 0, 2, 2, 1]))
    cache.crop(12)
    text = torch.cat((x[[2, 0, 2, 2, 1], :12], other), 1)
    assert_close(decoder.step(other, cache), decoder.whole(text)[:, 12:])
    cache.crop(torch.tensor([21, 5, 13, 1, 20]))
    cache.reorder(torch.tensor([3, 1, 4]))
    more = random(3, 4, 13, seed=2)
    found = torch.cat([decoder.step(chunk, cache) for chunk in more.split([1, 2, 1], dim=1)], 1)
    for row, (source, length) in enumerate([(3, 1), (1, 5), (4, 20)]):
        alone = torch.cat((text[source : source + 1, :length], more[row : row + 1]), 1)
        assert_close(found[row : row + 1], decoder.whole(alone)[:, length:])


def test_a_rolling_cache_can_be_cropped_within_its_window():
    decoder = Decoder("halves", Window(6, 0))
    x = random(2, 40, 13)
    cache = decoder.attention.new_cache()
    decoder.step(x[:, :5], cache)
    for index in range(5, 15):
        decoder.step(x[:, index : index + 1], cache)
    oldest = cache.length - cache.held
    with pytest.raises(CacheError, match="dropped") as caught:
        cache.crop(oldest + 5)
    assert_four_parts(caught.value)
    assert cache.length == 15
    keep = [oldest + 6, oldest + 7]
    cache.crop(keep)
    assert cache.lengths == keep
    more = random(2, 20, 13, seed=3)
    found = torch.cat([decoder.step(chunk, cache) for chunk in more.split([1, 1, 8, 10], dim=1)], 1)
    for row, length in enumerate(keep):
        whole = decoder.whole(torch.cat((x[row : row + 1, :length], more[row : row + 1]), 1))
        assert_close(found[row : row + 1], whole[:, length:])


@pytest.mark.parametrize("window", [None, 5])
def test_random_operations_on_a_layer_equal_each_rows_own_history(window):
    decoder = Decoder("halves", Causal() if window is None else Window(window, 0))
    draw = torch.Generator().manual_seed(17)

    def pick(low, high, count=1):
        return torch.randint(low, high + 1, (count,), generator=draw).tolist()

    for trial in range(4):
        cache = decoder.attention.new_cache()
        rows = [random(0, 13) for _ in range(3)]
        for turn in range(14):
            (choice,) = pick(0, 3)
            if choice <= 1 or not turn:
                (count,) = pick(1, 6)
                more = random(len(rows), count, 13, seed=1000 * trial + turn)
                found = decoder.step(more, cache)
                rows = [torch.cat((row, new)) for row, new in zip(rows, more, strict=True)]
                for row, output in zip(rows, found, strict=True):
                    assert_close(output, decoder.whole(row[None])[0, len(row) - count :])
            elif choice == 2:
                index = pick(0, len(rows) - 1, pick(1, 4)[0])
                cache.reorder(torch.tensor(index))
                rows = [rows[source] for source in index]
            else:
                keep = [max(len(row) - drop, 0) for row, drop in zip(rows, pick(0, 4, len(rows)), strict=True)]
                try:
                    cache.crop(keep)
                except CacheError:
                    assert window is not None
                    continue
                rows = [row[:length] for row, length in zip(rows, keep, strict=True)]


# Old outputs do not move


@pytest.mark.skipif(library.missing() is not None, reason=f"no native kernels: {library.missing()}")
@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("pattern", [Causal(), Causal() & Window(9, 0), Causal() & Strided(3)], ids=repr)
def test_the_kernel_gives_old_tokens_the_same_bits_when_one_is_appended(pattern, dtype):
    query, key, value = (random(2, 3, 47, size, seed=size, dtype=dtype) for size in (5, 5, 7))
    whole = attend(query, key, value, pattern=pattern, backend="native")
    for count in (5, 13, 31, 45, 46):
        cut = [tensor[:, :, :count] for tensor in (query, key, value)]
        assert torch.equal(attend(*cut, pattern=pattern, backend="native"), whole[:, :, :count])


@pytest.mark.parametrize("pattern", [Causal(), Window(9, 0)], ids=repr)
def test_cached_outputs_have_the_same_bits_in_a_longer_run(pattern):
    decoder, x = Decoder("halves", pattern, dtype=torch.float32), random(2, 90, 13, dtype=torch.float32)
    short = decoder.decode(x[:, :40], [7] + [1] * 33, decoder.attention.new_cache())
    long = decoder.decode(x, [7] + [1] * 83, decoder.attention.new_cache())
    assert torch.equal(long[:, :40], short)
    fixed = decoder.decode(x, [7] + [1] * 83, KVCache(90))
    if pattern == Causal():
        assert torch.equal(fixed, long)  # moving to a larger storage changes nothing


def test_training_with_a_cache_is_refused():
    layer = MultiHeadAttention(SIZES, attention=Attention(pattern=Causal()))
    with pytest.raises(CacheError, match="no_grad"):
        layer(torch.randn(2, 3, 13), cache=layer.new_cache())


REFUSED = {
    "no mask": (Full(), KVCache(), None),
    "no pattern": (None, KVCache(), None),
    "window too small": (Window(3, 0), KVCache(window=2), None),
    "window for everything": (Causal(), KVCache(window=9), None),
    "pattern that counts": (Window(3, 0), KVCache(window=3), Blocks(2)),
    "future": (Window(3, 1), KVCache(), None),
    "a sum of a softmax": (Causal(), StateCache(), None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_cache_that_would_change_the_outputs_is_refused(case):
    described, cache, pattern = REFUSED[case]
    layer = MultiHeadAttention(SIZES, attention=Attention(pattern=described)).double().eval()
    with torch.no_grad(), pytest.raises(CacheError) as caught:
        layer(random(2, 3, 13), cache=cache, pattern=pattern)
    assert_four_parts(caught.value)
    assert cache.length == 0


def test_attention_without_a_past_has_no_cache():
    for pattern in (None, Full(), Window(3, 1), ~Causal()):
        with pytest.raises(CacheError, match="cannot be cached") as caught:
            MultiHeadAttention(SIZES, attention=Attention(pattern=pattern)).new_cache()
        assert_four_parts(caught.value)


@pytest.mark.parametrize("pattern", [Causal() & Blocks(4), Causal() & First(3)], ids=repr)
def test_unequal_rows_need_an_attention_of_distances(pattern):
    decoder = Decoder("none", pattern)
    for cache in (decoder.attention.new_cache(), None):
        with torch.no_grad(), pytest.raises(CacheError, match="begins at another position") as caught:
            decoder.attention(random(2, 5, 13), cache=cache, lengths=[5, 2])
        assert_four_parts(caught.value)


def test_rotary_positions_do_not_reach_into_another_text():
    layer = MultiHeadAttention(12, 3, rotary=Rotary(4))
    x = torch.randn(2, 5, 12)
    for words in ({"context": x}, {"context": x, "cache": CrossCache()}):
        with pytest.raises(InputError, match="in one sequence") as caught:
            layer(x, **words)
        assert_four_parts(caught.value)
    with pytest.raises(InputError):
        layer.weights(x, x)
