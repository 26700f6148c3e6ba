"""Files of llama2.c, made here byte by byte, and a real one."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from regard.downloads import find
from regard.errors import CheckpointError, InputError
from regard.models.io import SentencePieceTokenizer, read_checkpoint
from regard.models.io.llama2c import is_llama2c, read_llama2c, read_tokenizer
from regard.models.io.rotary_rows import halves_from_pairs

DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCABULARY, CONTEXT = 24, 31, 3, 6, 2, 17, 11


def shapes(tied: bool) -> dict[str, tuple[int, ...]]:
    """In the order of the file, by llama2.c's own names."""
    head = DIM // HEADS
    inner = {
        "token_embedding": (VOCABULARY, DIM),
        "rms_att": (LAYERS, DIM),
        "wq": (LAYERS, DIM, DIM),
        "wk": (LAYERS, KV_HEADS * head, DIM),
        "wv": (LAYERS, KV_HEADS * head, DIM),
        "wo": (LAYERS, DIM, DIM),
        "rms_ffn": (LAYERS, DIM),
        "w1": (LAYERS, HIDDEN, DIM),
        "w2": (LAYERS, DIM, HIDDEN),
        "w3": (LAYERS, HIDDEN, DIM),
        "rms_final": (DIM,),
        "cosines": (CONTEXT, head // 2),
        "sines": (CONTEXT, head // 2),
    }
    return inner if tied else inner | {"wcls": (VOCABULARY, DIM)}


def write(path: Path, tied: bool = True, after: bytes = b"") -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    arrays = {name: random.standard_normal(shape).astype("<f4") for name, shape in shapes(tied).items()}
    header = struct.pack("<7i", DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCABULARY if tied else -VOCABULARY, CONTEXT)
    path.write_bytes(header + b"".join(array.tobytes() for array in arrays.values()) + after)
    return arrays


def vocab_size() -> tuple[list[bytes], list[float]]:
    """Signs, bytes, letters, and unions of letters with scores that make the order of joining matter."""
    signs = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256))]
    letters = [b" ", b"a", b"b", b"c", "é".encode()]
    unions = [b"ab", b"bc", b"abc", b" a", b" ab", b"aa", b"aaaa", b"ca", b"bca", "éa".encode()]
    scores = [-5.0, -3.0, -9.0, -4.0, -8.0, -2.0, -2.0, -3.0, -7.0, -6.0]
    return [*signs, *letters, *unions], [0.0] * (len(signs) + len(letters)) + scores


def tokenizer_file(tokens: list[bytes], scores: list[float]) -> bytes:
    rows = (struct.pack("<fi", score, len(token)) + token for token, score in zip(tokens, scores, strict=True))
    return struct.pack("<i", max(map(len, tokens))) + b"".join(rows)


# Models


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["x.bin", "x.data"])
def test_every_number_is_where_llama2c_has_it(tmp_path: Path, tied: bool, name: str):
    arrays = {key: torch.from_numpy(array) for key, array in write(tmp_path / name, tied).items()}
    config, state = read_checkpoint(tmp_path / name)
    places = {
        "rms_att": "input_layernorm",
        "wv": "self_attn.v_proj",
        "wo": "self_attn.o_proj",
        "rms_ffn": "post_attention_layernorm",
        "w1": "mlp.gate_proj",
        "w2": "mlp.down_proj",
        "w3": "mlp.up_proj",
    }
    expected = {
        f"model.layers.{layer}.{place}.weight": arrays[key][layer]
        for key, place in places.items()
        for layer in range(3)
    }
    for layer in range(3):
        stem = f"model.layers.{layer}.self_attn"
        expected[f"{stem}.q_proj.weight"] = halves_from_pairs(arrays["wq"][layer], HEADS)
        expected[f"{stem}.k_proj.weight"] = halves_from_pairs(arrays["wk"][layer], KV_HEADS)
    expected |= {"model.embed_tokens.weight": arrays["token_embedding"], "model.norm.weight": arrays["rms_final"]}
    expected |= {} if tied else {"lm_head.weight": arrays["wcls"]}
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor), key
    assert config["tie_word_embeddings"] == tied
    assert (config["vocab_size"], config["num_key_value_heads"], config["intermediate_size"]) == (17, 2, 31)


def test_turning_neighbours_before_equals_turning_halves_after():
    """llama2.c turns channels (2i, 2i+1) of its rows; on reordered rows turning (i, i+dim/2) gives the same scores."""
    torch.manual_seed(2)
    x, dim = torch.randn(7, 13, dtype=torch.float64), 10
    query, key = (torch.randn(3 * dim, 13, dtype=torch.float64) for _ in "qk")
    angle = torch.arange(7.0, dtype=torch.float64)[:, None, None] * 10000.0 ** (
        -torch.arange(0, dim, 2, dtype=torch.float64) / dim
    )
    turn = torch.polar(torch.ones_like(angle), angle)

    def pairs(weight: torch.Tensor) -> torch.Tensor:
        made = (x @ weight.T).view(7, 3, dim // 2, 2)
        return torch.view_as_real(torch.view_as_complex(made) * turn).flatten(-2)

    def halves(weight: torch.Tensor) -> torch.Tensor:
        first, second = (x @ halves_from_pairs(weight, 3).T).view(7, 3, 2, dim // 2).unbind(2)
        return torch.cat((first * turn.real - second * turn.imag, second * turn.real + first * turn.imag), -1)

    expected = torch.einsum("qhd,khd->hqk", pairs(query), pairs(key))
    found = torch.einsum("qhd,khd->hqk", halves(query), halves(key))
    assert torch.allclose(found, expected, rtol=0, atol=13 * 13 * dim * 100 * torch.finfo(torch.float64).eps)
    assert not torch.allclose(torch.einsum("qhd,khd->hqk", halves(query), pairs(key)), expected, atol=1e-3)


@pytest.mark.parametrize("cut", [0, 5, 28, -1, -4000])
def test_a_file_cut_short_is_refused_by_name(tmp_path: Path, cut: int):
    write(tmp_path / "x.bin")
    content = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "x.bin").write_bytes(content[:cut])
    with pytest.raises(CheckpointError, match=r"x\.bin cannot be read"):
        read_llama2c(tmp_path / "x.bin")
    assert not is_llama2c(tmp_path / "x.bin")


@pytest.mark.parametrize(
    "header", [(0,) * 7, (-1,) * 7, (24, 31, 3, 5, 5, 17, 11), (24, 31, 3, 6, 4, 17, 11), (2**30,) * 7]
)
def test_a_header_of_no_llama_is_refused(tmp_path: Path, header: tuple[int, ...]):
    (tmp_path / "x.bin").write_bytes(struct.pack("<7i", *header) + bytes(1000))
    with pytest.raises(CheckpointError, match="no sizes of a LLaMA"):
        read_llama2c(tmp_path / "x.bin")


# Tokenizers

SMALL = SentencePieceTokenizer(*vocab_size())


def naive(tokenizer: SentencePieceTokenizer, text: str) -> list[int]:
    """The loop of llama2.c: look at all neighbours, join the first of the best, begin again."""
    numbers = {token: index for index, token in reversed(list(enumerate(tokenizer.tokens))) if index >= 259}
    pieces: list[int] = []
    for character in f" {text}" if text else "":
        encoded = character.encode()
        pieces += [numbers[encoded]] if encoded in numbers else [byte + 3 for byte in encoded]
    while True:
        best, where, union = -math.inf, -1, -1
        for place in range(len(pieces) - 1):
            joined = tokenizer.tokens[pieces[place]] + tokenizer.tokens[pieces[place + 1]]
            number = numbers.get(joined)
            if number is not None and tokenizer.scores[number] > best:
                best, where, union = tokenizer.scores[number], place, number
        if where < 0:
            return [1, *pieces]
        pieces[where : where + 2] = [union]


@settings(deadline=None)
@given(some.text(alphabet="abc é🙂\n<", max_size=40))
def test_merging_by_a_queue_equals_merging_by_comparing_all_neighbours(text: str):
    assert SMALL.encode(text) == naive(SMALL, text)


@settings(deadline=None, max_examples=50)
@given(some.text(max_size=40))
def test_every_text_comes_back(text: str):
    assert SMALL.decode(SMALL.encode(text, end=True)) == text.encode("utf-8", "replace").decode()


def test_a_case_by_hand():
    tokenizer = SentencePieceTokenizer(*vocab_size())
    names = [tokenizer.tokens[number] for number in tokenizer.encode("aaabc", begin=False)]
    # "aa" (-2) is joined first, then "bc" (-3) before " a" (-4): it cannot be, the a is gone; then "a" + "bc" (-9)
    assert names == [b" ", b"aa", b"abc"]


def test_a_text_that_spells_a_sign_stays_text():
    tokenizer = SentencePieceTokenizer(*vocab_size())
    assert tokenizer.encode("<s>")[1:] == [259, *(byte + 3 for byte in b"<s>")]


def test_a_tokenizer_is_read_alone_and_behind_a_model(tmp_path: Path):
    tokens, scores = vocab_size()
    (tmp_path / "tokenizer.bin").write_bytes(tokenizer_file(tokens, scores))
    found = read_tokenizer(tmp_path / "tokenizer.bin")
    assert (found.tokens, found.scores) == (tokens, scores)
    assert len(read_tokenizer(tmp_path / "tokenizer.bin", vocab_size=265)) == 265


def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path):
    tokens, scores = vocab_size()
    content = tokenizer_file(tokens, scores)
    (tmp_path / "tokenizer.bin").write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"tokenizer\.bin cannot be read"):
        read_tokenizer(tmp_path / "tokenizer.bin")
    (tmp_path / "tokenizer.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match="the model has 300"):
        read_tokenizer(tmp_path / "tokenizer.bin", vocab_size=300)
    write(tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match="a model and nothing after it"):
        read_tokenizer(tmp_path / "x.bin")


def test_numbers_outside_the_vocabulary_and_too_few_tokens_are_refused():
    tokenizer = SentencePieceTokenizer(*vocab_size())
    with pytest.raises(InputError, match=f"a vocabulary of {len(tokenizer)}"):
        tokenizer.decode([len(tokenizer)])
    with pytest.raises(InputError, match="make no tokenizer"):
        SentencePieceTokenizer([b"a"], [0.0])


# A real file


def stories() -> Path:
    path = find("stories15m")
    if path is None:
        pytest.skip("stories15M is not here: python -m regard.downloads stories15m")
    return path


def test_the_real_file_has_a_model_and_a_tokenizer():
    config, state = read_checkpoint(stories())
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (288, 6, 32000)
    assert len(state) == 6 * 9 + 2
    # The file ends with tables that are not needed, and whose every number is known: they lie where they should only
    # if every tensor before them has the size it was read with.
    end = 28 + 4 * 15_204_000
    tables = np.frombuffer(stories().read_bytes()[end - 4 * 256 * 48 : end], "<f4").reshape(2, 256, 24)
    angle = np.arange(256)[:, None] * 10000.0 ** (-np.arange(0, 48, 2) / 48)
    # an angle up to 255 rounded to float32 is off by 2^-17
    np.testing.assert_allclose(tables, [np.cos(angle), np.sin(angle)], rtol=0, atol=2 * 2.0**-17)


def test_the_real_tokenizer_gives_the_published_numbers():
    tokenizer = read_tokenizer(stories())
    published = {
        "": [1],
        "I believe the meaning of life is": [1, 306, 4658, 278, 6593, 310, 2834, 338],
        "Simply put, the theory of relativity states that ": [
            *(1, 3439, 17632, 1925, 29892, 278, 6368, 310, 14215, 537, 5922, 393, 29871)
        ],
    }
    for text, numbers in published.items():
        assert tokenizer.encode(text) == numbers, text
    for text in ("Once upon a time", "é ü 灯 🙂\n\ttab", " two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode(text) == naive(tokenizer, text)
