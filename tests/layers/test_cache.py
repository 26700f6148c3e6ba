"""The content of caches against lists of tokens; sums, contexts, and refusals."""

import itertools

import pytest
import torch
from decoders import Decoder, assert_close, assert_four_parts, random, splits
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import (
    Padding,
    Window,
)
from regard.errors import CacheError
from regard.layers import (
    AttentionSizes,
    CrossCache,
    KVCache,
    ModelCache,
    MultiHeadAttention,
    StateCache,
)

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
            returned = key[row, 0, columns - visible :, 0].tolist()
            needed = len(tokens) if window is None else min(len(tokens), max(real[row], count) + window)
            assert len(returned) >= needed
            assert returned == tokens[len(tokens) - len(returned) :]

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


# Other caches


def test_the_context_is_projected_once(monkeypatch):
    layer = MultiHeadAttention(AttentionSizes(13, 6, 2, key=4, value=5, context=7, values=11)).double().eval()
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
    decoder = Decoder("halves", feature_map=features, scale=0.3)
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


def test_a_model_cache_reorders_and_crops_all_its_layers():
    caches = ModelCache([KVCache(), KVCache(window=3)], [CrossCache()])
    token = random(3, 2, 5, 4)
    for cache in caches.layers:
        cache.append(token, token, [5, 2, 4])
    caches.cross_layers[0].fill(token, token)
    caches.encoder_padding = Padding([5, 1, 3])
    assert (caches.length, caches.lengths) == (5, [5, 2, 4])
    caches.reorder(torch.tensor([1, 0]))
    assert caches.encoder_padding == Padding([1, 5])
    assert caches.lengths == [2, 5]
    assert caches.positions(2).tolist() == [[2, 3], [5, 6]]
    assert torch.equal(caches.cross_layers[0].key, token[[1, 0]])
    caches.crop([2, 4])
    assert [cache.length for cache in caches.layers] == [4, 4]
    assert ModelCache([]).positions(3).tolist() == [0, 1, 2]
    assert (ModelCache([]).length, ModelCache([]).lengths) == (0, None)


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
    with pytest.raises(CacheError, match="cropped to these lengths") as caught:
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
def test_a_cache_has_a_capacity(words):
    with pytest.raises(CacheError, match="holds tokens") as caught:
        KVCache(**words)
    assert_four_parts(caught.value)


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
