"""Decoding from a cache gives the outputs of the whole text, whatever was appended, cropped and reordered."""

import itertools

import pytest
import torch
from catalog import PATTERNS, TOKENS
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import (
    Alibi,
    Attention,
    Axial,
    Bias,
    Blocks,
    Causal,
    First,
    Full,
    Padding,
    Quadratic,
    RegardError,
    RelativeTable,
    RowColumn,
    Segments,
    Strided,
    TransformerXL,
    Window,
    attend,
)
from regard.errors import CacheError, InputError
from regard.kernels import library
from regard.layers import (
    CrossCache,
    KVCache,
    LearnedPositions,
    Memory,
    MultiHeadAttention,
    Rotary,
    SinusoidalPositions,
    Sizes,
    StateCache,
)
from regard.patterns import And, Not, Or, has_past

F64 = torch.float64
# What the requirements ask of step by step against all at once.
TOLERANCE = {F64: 1e-12, torch.float32: 1e-5}
SIZES = Sizes(13, heads=6, kv_heads=2, key=4, value=5, output=11)
POSITIONS = ["none", "sinusoidal", "learned", "halves", "pairs", "alibi", "table", "quadratic", "transformer-xl"]


def random(*shape, seed=0, dtype=F64):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Decoder(torch.nn.Module):
    """Tokens, their positions, one attention: the smallest thing that decodes."""

    def __init__(self, position="none", pattern=None, *, dtype=F64, sizes=SIZES, **words):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        heads, dim = sizes.heads, sizes.key
        bias = {
            "alibi": lambda: Alibi(heads),
            "table": lambda: RelativeTable(heads, distance=6, generator=generator),
            "quadratic": lambda: Quadratic(heads, generator=generator),
            "transformer-xl": lambda: TransformerXL(heads, dim, generator=generator),
        }.get(position, lambda: None)()
        rotary = Rotary(dim, 100.0, position) if position in ("halves", "pairs") else None
        self.added = None
        if position == "sinusoidal":
            self.added = SinusoidalPositions(sizes.input - sizes.input % 2)
        if position == "learned":
            self.added = LearnedPositions(200, sizes.input)
        pattern = Causal() if pattern is None else pattern
        described = Attention(pattern=pattern, bias=bias, **words)
        self.attention = MultiHeadAttention(sizes, attention=described, rotary=rotary)
        self.to(dtype).eval()
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, seed=100 + index) * 0.4)

    def with_positions(self, x, positions):
        if isinstance(self.added, SinusoidalPositions):
            table = self.added(positions, x.dtype)
            return x + torch.nn.functional.pad(table, (0, x.shape[-1] - table.shape[-1]))
        return x if self.added is None else x + self.added(positions)

    @torch.no_grad()
    def whole(self, x, pattern=None):
        return self.attention(self.with_positions(x, torch.arange(x.shape[1])), pattern=pattern)

    @torch.no_grad()
    def step(self, x, cache, pattern=None, lengths=None):
        placed = self.with_positions(x, cache.positions(x.shape[1], lengths))
        return self.attention(placed, cache=cache, pattern=pattern, lengths=lengths)

    def decode(self, x, chunks, cache, pattern_at=None):
        assert sum(chunks) == x.shape[1]
        outputs, done = [], 0
        for chunk in x.split(chunks, dim=1):
            done += chunk.shape[1]
            outputs.append(self.step(chunk, cache, pattern_at and pattern_at(done)))
        return torch.cat(outputs, 1)


def splits(total, seed=0):
    """Ways to cut a text: at once, one by one, a little and then much, and at random."""
    generator = torch.Generator().manual_seed(seed)
    cuts = [[total], [1] * total, [1, 2, total - 3], [total - 2, 1, 1]]
    for _ in range(2):
        places = torch.randperm(total - 1, generator=generator)[:5].add(1).sort().values.tolist()
        cuts.append([b - a for a, b in itertools.pairwise([0, *places, total])])
    return cuts


def assert_close(found, expected, dtype=F64):
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= TOLERANCE[dtype]


def assert_four_parts(error: RegardError):
    assert isinstance(error, RegardError)
    assert error.headline.endswith(".")
    assert error.asked
    assert error.because
    assert error.instead


def as_of(pattern, tokens):
    """The pattern when only the first `tokens` of all `TOKENS` had arrived: facts about rows grow with the tokens."""
    if isinstance(pattern, And):
        return as_of(pattern.left, tokens) & as_of(pattern.right, tokens)
    if isinstance(pattern, Or):
        return as_of(pattern.left, tokens) | as_of(pattern.right, tokens)
    if isinstance(pattern, Not):
        return ~as_of(pattern.pattern, tokens)
    if isinstance(pattern, Segments):
        return Segments(pattern.ids[:, :tokens])
    if isinstance(pattern, Padding) and pattern.side == "left":
        return Padding([max(count - (TOKENS - tokens), 0) for count in pattern.counts], side="left")
    if isinstance(pattern, Padding):
        return Padding([min(count, tokens) for count in pattern.counts])
    return pattern


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


WITH_PAST = [p if has_past(p) else Causal() & p for p in PATTERNS]
WITH_PAST = [p for p in WITH_PAST if has_past(p)]


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
    assert len(WITH_PAST) >= len(PATTERNS) - 3


@pytest.mark.parametrize("beta", [0.0, -0.7, 2.3, float("inf")])
def test_every_temperature_decodes_as_the_whole_text(beta):
    decoder = Decoder("none", Window(5, 0), beta=beta)
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
    """A bias that looks at the key's own position, which no window may forget."""

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
    x[0, :5] = torch.nan  # nobody may look at padding
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


def test_a_window_can_be_cropped_as_far_as_it_remembers():
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


# A list of tensors as the oracle of the storage


appends = st.tuples(st.just("append"), st.integers(1, 9))
crops = st.tuples(st.just("crop"), st.lists(st.integers(0, 6), min_size=4, max_size=4))
reorders = st.tuples(st.just("reorder"), st.lists(st.integers(0, 3), min_size=1, max_size=4))


@settings(max_examples=120)
@given(
    st.sampled_from([None, 0, 1, 4, 7]),
    st.one_of(st.none(), st.lists(st.integers(0, 5), min_size=3, max_size=3)),
    st.lists(st.one_of(appends, appends, crops, reorders), max_size=14),
)
def test_storage_holds_what_a_list_of_tokens_would(window, lengths, operations):
    cache = KVCache(window=window)
    fresh = itertools.count(1)
    rows: list[list[int]] = [[], [], []]

    def append(count, real=None):
        real = [count] * len(rows) if real is None else real
        chunk = torch.zeros(len(rows), count)
        for row, length in enumerate(real):
            numbers = list(itertools.islice(fresh, length))
            rows[row].extend(numbers)
            chunk[row, count - length :] = torch.tensor(numbers, dtype=torch.float32)
        given_lengths = None if real == [count] * len(rows) else real
        key = chunk[:, None, :, None].expand(-1, 2, -1, 3)
        key, value = cache.append(key, -key[..., :1], given_lengths)
        assert torch.equal(key[..., :1], -value)
        assert torch.equal(key, key[:, :1, :, :1].expand_as(key))
        columns = key.shape[2]
        hidden = cache.padding
        assert hidden is None or (hidden.side == "left" and max(hidden.counts) <= columns)
        for row, tokens in enumerate(rows):
            visible = columns if hidden is None else hidden.counts[row]
            seen = key[row, 0, columns - visible :, 0].tolist()
            needed = len(tokens) if window is None else min(len(tokens), max(real[row], count) + window)
            assert len(seen) >= needed
            assert seen == tokens[len(tokens) - len(seen) :]

    append(5, lengths)
    for name, argument in operations:
        before = [len(tokens) for tokens in rows]
        assert (cache.lengths or [cache.length] * len(rows)) == before
        assert cache.length == max(before)
        expected = [[length + i for i in range(2)] for length in before]
        assert (cache.positions(2).expand(len(rows), 2)).tolist() == expected
        assert cache.batch == len(rows)
        if name == "append":
            append(argument)
        elif name == "reorder":
            index = [number % len(rows) for number in argument]
            cache.reorder(torch.tensor(index))
            rows = [list(rows[source]) for source in index]
        else:
            back = [min(drop, length) for drop, length in zip(argument, before, strict=False)]
            keep = [length - drop for length, drop in zip(before, back, strict=True)]
            try:
                cache.crop(keep)
            except CacheError:
                assert window is not None
                assert max(back) > 0
                continue
            rows = [tokens[:length] for tokens, length in zip(rows, keep, strict=True)]
        if window is not None:
            assert cache.bytes <= (2 * window + 1) * len(rows) * 2 * 4 * 4
    assert cache.length == max(len(tokens) for tokens in rows)


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


# Storage


def test_without_a_capacity_the_storage_doubles_and_with_one_it_never_moves():
    growing, fixed = KVCache(), KVCache(200)
    addresses, sizes = set(), []
    for seed in range(150):
        for cache in (growing, fixed):
            token = random(2, 3, 1, 5, seed=seed)
            key, value = cache.append(token, token[..., :2])
        addresses.add(key.data_ptr())
        sizes.append(growing.bytes)
    assert len(addresses) == 1
    assert len(set(sizes)) == 3  # 64, 128, 256
    assert key.shape == (2, 3, 150, 5)
    assert value.shape == (2, 3, 150, 2)
    assert fixed.bytes == 200 * 2 * 3 * 7 * 8
    assert repr(fixed) == "KVCache(150 tokens, capacity=200)"
    assert repr(KVCache(window=7)) == "KVCache(0 tokens, window=7)"
    expected = torch.cat([random(2, 3, 1, 5, seed=seed) for seed in range(150)], 2)
    assert torch.equal(key, expected)
    assert torch.equal(growing.append(token, token[..., :2])[0][:, :, :150], expected)


def test_an_empty_cache_has_nothing_to_crop_or_turn():
    cache = KVCache()
    cache.crop(0)
    cache.reorder(torch.tensor([1, 0]))
    assert (cache.length, cache.bytes, cache.held, cache.batch, cache.padding) == (0, 0, 0, None, None)


def test_a_cache_cropped_to_nothing_starts_again():
    decoder, x = Decoder("halves"), random(3, 9, 13)
    cache = decoder.attention.new_cache()
    decoder.step(random(3, 6, 13, seed=4), cache)
    cache.crop(0)
    found = decoder.step(x, cache, lengths=[9, 2, 5])
    assert_close(found[1:2, 7:], decoder.whole(x[1:2, 7:]))


def test_half_precision_is_kept_as_it_comes():
    decoder = Decoder("halves", dtype=torch.float32).to(torch.bfloat16)
    cache = decoder.attention.new_cache()
    output = decoder.step(random(2, 5, 13, dtype=torch.bfloat16), cache)
    assert output.dtype == torch.bfloat16
    assert cache.bytes == 64 * 2 * 2 * 9 * 2


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


# Other caches


def test_the_context_is_projected_once(monkeypatch):
    layer = MultiHeadAttention(Sizes(13, 6, 2, key=4, value=5, context=7, values=11)).double().eval()
    x, context, values = random(3, 9, 13), random(3, 17, 7), random(3, 17, 11)
    calls = []
    project = layer.projections.key_value
    monkeypatch.setattr(layer.projections, "key_value", lambda *tensors: calls.append(1) or project(*tensors))
    with torch.no_grad():
        expected = layer(x, context, values)
        assert len(calls) == 1
        cache = CrossCache()
        found = [layer(x[:, :4], context, values, cache=cache)]
        found += [layer(chunk, cache=cache) for chunk in x[:, 4:].split([1, 3, 1], dim=1)]
        assert len(calls) == 2
        assert_close(torch.cat(found, 1), expected)
        hidden = Padding([17, 4, 9])
        assert_close(layer(x, cache=cache, pattern=hidden), layer(x, context, values, pattern=hidden))
        cache.reorder(torch.tensor([2, 2]))
        cache.crop(1)  # the other text stays
        assert_close(layer(x[[2, 2]], cache=cache), expected[[2, 2]])


def test_an_empty_cross_cache_needs_a_context():
    layer = MultiHeadAttention(12, 3)
    with pytest.raises(CacheError, match="first step") as caught:
        layer(torch.randn(2, 3, 12), cache=CrossCache())
    assert_four_parts(caught.value)
    cache = CrossCache()
    cache.reorder(torch.tensor([0]))
    assert cache.key is None


FEATURES = ["elu1", "relu", "taylor2", "favor+"]


@pytest.mark.parametrize("position", ["none", "sinusoidal", "learned", "halves", "pairs"])
@pytest.mark.parametrize("features", FEATURES)
def test_sums_decode_linear_attention_as_the_whole_text(features, position):
    decoder = Decoder(position, feature_map=features)
    x = random(3, 23, 13)
    expected = decoder.whole(x)
    for chunks in splits(23):
        cache = decoder.attention.new_cache()
        assert isinstance(cache, StateCache)
        assert_close(decoder.decode(x, chunks, cache), expected)
    size = cache.state.sums.numel()
    decoder.step(random(3, 40, 13), cache)
    assert cache.state.sums.numel() == size  # a long text needs no more room
    assert cache.length == 63


@pytest.mark.parametrize("features", FEATURES)
def test_sums_can_be_reordered_and_padded(features):
    decoder = Decoder("halves", feature_map=features, beta=0.3)
    lengths, x, more = [3, 8, 5], random(3, 9, 13), random(4, 6, 13, seed=1)
    cache = decoder.attention.new_cache()
    first = decoder.step(x, cache, lengths=lengths)
    assert cache.length == 8
    for row, length in enumerate(lengths):
        assert_close(first[row : row + 1, 9 - length :], decoder.whole(x[row : row + 1, 9 - length :]))
    index = [2, 0, 0, 2]
    cache.reorder(torch.tensor(index))
    assert (cache.lengths, cache.length) == ([5, 3, 3, 5], 5)
    found = torch.cat([decoder.step(chunk, cache) for chunk in more.split([1, 4, 1], dim=1)], 1)
    for row, source in enumerate(index):
        text = torch.cat((x[source : source + 1, 9 - lengths[source] :], more[row : row + 1]), 1)
        assert_close(found[row : row + 1], decoder.whole(text)[:, lengths[source] :])


def test_a_row_without_any_token_starts_its_sum_at_zero():
    decoder = Decoder("none", feature_map="elu1")
    x, more = random(2, 4, 13), random(2, 3, 13, seed=1)
    cache = decoder.attention.new_cache()
    decoder.step(x, cache, lengths=[4, 0])
    assert_close(decoder.step(more, cache)[1:], decoder.whole(more[1:]))


def test_a_feature_map_with_a_window_is_no_sum_and_keeps_its_keys():
    decoder = Decoder("none", Window(3, 0), feature_map="elu1")
    cache = decoder.attention.new_cache()
    assert isinstance(cache, KVCache)
    x = random(2, 23, 13)
    assert_close(decoder.decode(x, [5, 1, 1, 9, 7], cache), decoder.whole(x))


def test_a_sum_cannot_be_cropped():
    decoder = Decoder("none", feature_map="elu1")
    cache = decoder.attention.new_cache()
    cache.reorder(torch.tensor([0]))
    decoder.step(random(2, 5, 13), cache)
    cache.crop(5)
    with pytest.raises(CacheError, match="taken out") as caught:
        cache.crop(4)
    assert_four_parts(caught.value)


# A model's caches together


def test_a_memory_turns_and_shrinks_all_its_caches():
    memory = Memory([KVCache(), KVCache(window=3)], [CrossCache()])
    token = random(3, 2, 5, 4)
    for cache in memory.caches:
        cache.append(token, token, [5, 2, 4])
    memory.crosses[0].fill(token, token)
    memory.context_pattern = Padding([5, 1, 3])
    assert (memory.length, memory.lengths) == (5, [5, 2, 4])
    memory.reorder(torch.tensor([1, 0]))
    assert memory.context_pattern == Padding([1, 5])
    assert memory.lengths == [2, 5]
    assert memory.positions(2).tolist() == [[2, 3], [5, 6]]
    assert torch.equal(memory.crosses[0].key, token[[1, 0]])
    memory.crop([2, 4])
    assert [cache.length for cache in memory.caches] == [4, 4]
    assert Memory([]).positions(3).tolist() == [0, 1, 2]
    assert (Memory([]).length, Memory([]).lengths) == (0, None)


# What cannot be done is said in four parts


def _filled(**words):
    cache = KVCache(**words)
    cache.append(random(2, 3, 4, 5), random(2, 3, 4, 7))
    return cache


BAD_APPENDS = {
    "no batch axis": (KVCache(), random(3, 1, 5), random(3, 1, 7), None, "one key and one value"),
    "other tokens": (KVCache(), random(2, 3, 1, 5), random(2, 3, 2, 7), None, "one key and one value"),
    "wrong batch": (_filled(), random(3, 3, 1, 5), random(3, 3, 1, 7), None, "holds keys"),
    "wrong heads": (_filled(), random(2, 1, 1, 5), random(2, 1, 1, 7), None, "holds keys"),
    "wrong size": (_filled(), random(2, 3, 1, 5), random(2, 3, 1, 5), None, "holds keys"),
    "wrong dtype": (_filled(), random(2, 3, 1, 5).float(), random(2, 3, 1, 7).float(), None, "float64"),
    "too many": (_filled(capacity=6), random(2, 3, 3, 5), random(2, 3, 3, 7), None, "room for 6"),
    "late padding": (_filled(), random(2, 3, 2, 5), random(2, 3, 2, 7), [2, 1], "holes"),
    "missing length": (KVCache(), random(2, 3, 2, 5), random(2, 3, 2, 7), [2], "2 rows of 2"),
    "long length": (KVCache(), random(2, 3, 2, 5), random(2, 3, 2, 7), [2, 3], "2 rows of 2"),
    "gradient": (KVCache(), random(2, 3, 2, 5).requires_grad_(), random(2, 3, 2, 7), None, "gradient"),
}


@pytest.mark.parametrize("case", BAD_APPENDS)
def test_what_does_not_fit_is_refused_and_changes_nothing(case):
    cache, key, value, lengths, reason = BAD_APPENDS[case]
    before = (cache.length, cache.held, cache.bytes)
    with pytest.raises(CacheError, match=reason) as caught:
        cache.append(key, value, lengths)
    assert_four_parts(caught.value)
    assert (cache.length, cache.held, cache.bytes) == before


@pytest.mark.parametrize("lengths", [-1, 5, [2, 5], [2], [-1, 2]])
def test_crops_that_make_no_sense_are_refused(lengths):
    cache = _filled()
    with pytest.raises(CacheError, match="cropped so") as caught:
        cache.crop(lengths)
    assert_four_parts(caught.value)
    assert cache.length == 4


@pytest.mark.parametrize("index", [[0, 2], [-1], []])
def test_rows_that_are_not_there_cannot_be_continued(index):
    cache = _filled()
    with pytest.raises(CacheError, match="no such rows") as caught:
        cache.reorder(torch.tensor(index, dtype=torch.int64))
    assert_four_parts(caught.value)
    sums = Decoder("none", feature_map="elu1")
    state = sums.attention.new_cache()
    sums.step(random(2, 3, 13), state)
    with pytest.raises(CacheError, match="no such rows"):
        state.reorder(torch.tensor(index, dtype=torch.int64))


@pytest.mark.parametrize("words", [{"capacity": 0}, {"window": -1}])
def test_a_cache_has_room(words):
    with pytest.raises(CacheError, match="holds tokens") as caught:
        KVCache(**words)
    assert_four_parts(caught.value)


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


def test_a_sum_has_no_place_for_a_batchs_pattern():
    decoder = Decoder("none", feature_map="elu1")
    with pytest.raises(CacheError, match="tell its tokens apart"):
        decoder.step(random(2, 3, 13), decoder.attention.new_cache(), Padding([3, 1]))


@pytest.mark.parametrize("lengths", [[2], [2, 4], [-1, 2]])
def test_a_sum_checks_lengths(lengths):
    decoder = Decoder("none", feature_map="elu1")
    with pytest.raises(CacheError, match="at most the number of tokens") as caught:
        decoder.step(random(2, 3, 13), decoder.attention.new_cache(), lengths=lengths)
    assert_four_parts(caught.value)
    cache = decoder.attention.new_cache()
    decoder.step(random(2, 3, 13), cache)
    with pytest.raises(CacheError, match="holes"):
        decoder.step(random(2, 3, 13), cache, lengths=[3, 2])


def test_attention_without_a_past_has_no_cache():
    for pattern in (None, Full(), Window(3, 1), ~Causal()):
        with pytest.raises(CacheError, match="no past") as caught:
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
        with pytest.raises(InputError, match="one and the same text") as caught:
            layer(x, **words)
        assert_four_parts(caught.value)
    with pytest.raises(InputError):
        layer.weights(x, x)
