"""Real checkpoints from registry packages, against the library they were trained with.

The decoders (SmolLM2, stories15M) are held against it in test_gguf.py and test_llama2c.py.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from twins import library, transformers

from regard import downloads
from regard.errors import InputError
from regard.models import Bert
from regard.models.io import SentencePieceTokenizer

# Six and twelve layers in float32, relative to the largest entry.
CLOSE = 1e-4


def folder(name):
    found = downloads.find(name)
    if found is None:
        pytest.skip(f"{name} is not here: python -m regard.downloads {name}")
    return found


def assert_close(mine, theirs):
    assert mine.shape == theirs.shape
    assert float((mine - theirs).abs().max()) <= CLOSE * float(theirs.abs().max())


SENTENCES = [
    "A man is playing a guitar.",
    "Somebody makes music with a stringed instrument.",
    "The stock market fell sharply on Tuesday, its worst day in more than a year, as investors sold what they could.",
    "Hello",
]


def minilm_texts(place):
    tokenizer = library("tokenizers").Tokenizer.from_file(str(place / "tokenizer.json"))
    tokenizer.no_padding()
    return [encoded.ids for encoded in tokenizer.encode_batch(SENTENCES)]


def test_minilm_has_the_hidden_states_of_transformers():
    place = folder("minilm")
    twin = transformers().BertModel.from_pretrained(place).eval()
    model, texts = Bert.from_pretrained(place), minilm_texts(place)
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    real = torch.arange(longest) < lengths[:, None]
    with torch.no_grad():
        theirs = twin(tokens, attention_mask=real.long())
        mine = model(tokens, lengths=lengths)
    assert_close(mine.hidden[real], theirs.last_hidden_state[real])
    assert_close(mine.pooled, theirs.pooler_output)
    mean = (theirs.last_hidden_state * real[..., None]).sum(1) / lengths[:, None]
    assert_close(model.embed(texts), torch.nn.functional.normalize(mean, dim=-1))


def test_minilm_ranks_paraphrases_first():
    place = folder("minilm")
    guitar, music, market, _ = Bert.from_pretrained(place).embed(minilm_texts(place))
    assert guitar @ music > 0.5
    assert guitar @ market < 0.1


def rxnfp():
    place = folder("rxnfp")
    hugging = transformers()
    config = hugging.BertConfig(**json.loads((place / "config.json").read_text()))
    twin = hugging.BertForPreTraining(config).eval()
    state = torch.load(place / "pytorch_model.bin", weights_only=True, map_location="cpu")
    missing, extra = twin.load_state_dict(state, strict=False)
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert set(extra) <= {"bert.embeddings.position_ids"}
    twin.tie_weights()
    return Bert.from_pretrained(place), twin, place


# An esterification, cut into the tokens of the vocabulary: acetic acid and ethanol make ethyl acetate.
REACTION = ["C", "C", "(", "=", "O", ")", "O", ".", "C", "C", "O", ">>", "C", "C", "(", "=", "O", ")", "O", "C", "C"]


def test_a_bert_with_both_heads_has_the_logits_of_transformers():
    model, twin, _ = rxnfp()
    assert model.config.masked_tokens
    assert model.config.next_sentence
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (3, 23), generator=generator)
    segments = torch.randint(0, 2, (3, 23), generator=generator)
    with torch.no_grad():
        theirs = twin(tokens, token_type_ids=segments)
        mine = model(tokens, segments)
    assert_close(mine.masked_tokens, theirs.prediction_logits)
    assert_close(mine.next_sentence, theirs.seq_relationship_logits)


def test_masked_atoms_are_recovered():
    model, _, place = rxnfp()
    names = (place / "vocab.txt").read_text(encoding="utf-8").split("\n")
    number = {name: index for index, name in enumerate(names)}
    text = [number["[CLS]"], *(number[token] for token in REACTION), number["[SEP]"]]
    hidden = list(range(1, len(text) - 1))
    masked = torch.tensor([text] * len(hidden))
    masked[torch.arange(len(hidden)), hidden] = number["[MASK]"]
    with torch.no_grad():
        logits = model(masked).masked_tokens
    guessed = logits[torch.arange(len(hidden)), hidden].argmax(-1)
    assert int((guessed == torch.tensor(text)[hidden]).sum()) > len(hidden) // 2


# The examples that use them, where they are given something else than they expect. What needs no weights has none.


def example(name):
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def teller(monkeypatch, written, context=50):
    """The example that tells stories, with a model that writes these tokens."""
    signs = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
    tokenizer = SentencePieceTokenizer([*signs, b" ", b"a"], [0.0] * 261)
    limits = []

    def stream(model, prompts, *, max_new_tokens, **choices):
        limits.append(max_new_tokens)
        if len(prompts[0]) + max_new_tokens > context:
            raise InputError("The text would outgrow the context.", because="it is long", instead="a shorter prompt")
        for token in written:
            if token is None:
                raise InputError("It stops here.", because="of a test", instead="nothing")
            yield 0, token

    module = example("tell_story")
    model = SimpleNamespace(context_length=context)
    monkeypatch.setattr(module, "fetch", lambda name: Path(name))
    monkeypatch.setattr(module, "GPT", SimpleNamespace(from_pretrained=lambda file: model))
    monkeypatch.setattr(module, "read_tokenizer", lambda file: tokenizer)
    monkeypatch.setattr(module, "stream", stream)
    return module, tokenizer, limits


def test_a_story_shows_characters_of_several_tokens_whole(monkeypatch, capsys):
    bare = SentencePieceTokenizer([b""] * 259, [0.0] * 259)
    written = bare.encode("a猫é🙂", begin=False)
    module, _, limits = teller(monkeypatch, written)
    assert module.main(["a", "--tokens", "31"]) == 0
    assert capsys.readouterr().out.startswith("a a猫é🙂\n\n")
    assert limits == [31]
    module, _, _ = teller(monkeypatch, [*written, 3 + 0xF0, 3 + 0x9F])  # the last one is cut short
    module.main(["a"])
    assert capsys.readouterr().out.startswith("a a猫é🙂\ufffd\n\n")


def test_a_prompt_beyond_the_context_is_reported(monkeypatch, capsys):
    module, _, limits = teller(monkeypatch, [], context=7)
    assert module.main(["aaaaaaaaaaaaaaa", "--tokens", "11"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("The text would outgrow the context.\n  because")
    assert limits == [11]


def test_an_interrupted_story_prints_the_reason_on_a_new_line(monkeypatch, capsys):
    module, _, _ = teller(monkeypatch, [260, None])
    assert module.main(["a"]) == 1
    assert capsys.readouterr().err.startswith("\nIt stops here.")


@pytest.mark.parametrize(
    "wrong", [["--tokens", "0"], ["--temperature", "-1"], ["--temperature", "nan"], ["--top-p", "0"]]
)
def test_a_story_without_weights_is_refused(monkeypatch, capsys, wrong):
    module, _, _ = teller(monkeypatch, [])
    with pytest.raises(SystemExit):
        module.main(wrong)
    assert f"error: {wrong[0]} is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        (b"caf\xe9", [], "is not UTF-8 text (byte 3)"),
        (b"\n  \n", [], "has no sentences"),
        (None, [], "No such file"),
        (b"a line", ["--count", "0"], "--count is 1 or more, not 0"),
    ],
)
def test_an_impossible_search_is_reported_in_one_line(monkeypatch, capsys, tmp_path, content, more, words):
    module = example("find_sentences")
    monkeypatch.setattr(module, "fetch", None)  # it is known before anything is downloaded
    if content is not None:
        (tmp_path / "x.txt").write_bytes(content)
    assert module.main(["--file", str(tmp_path / "x.txt"), *more]) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_search_without_its_tokenizer_is_reported_in_one_line(monkeypatch, capsys, tmp_path):
    library("tokenizers")
    module = example("find_sentences")
    monkeypatch.setattr(module, "fetch", lambda name: tmp_path)
    monkeypatch.setattr(module, "Bert", SimpleNamespace(from_pretrained=lambda place: None))
    assert module.main([]) == 1
    said = capsys.readouterr().err
    assert "tokenizer.json cannot be read" in said
    assert said.count("\n") == 1


def test_a_search_counts_sentences_and_not_the_question(capsys, tmp_path):
    folder("minilm")
    library("tokenizers")
    (tmp_path / "x.txt").write_text("Leaves eat light.\n\nThe train is late.\nBread rises.\n")
    assert (
        example("find_sentences").main(["how do plants eat?", "--file", str(tmp_path / "x.txt"), "--count", "1"]) == 0
    )
    said = capsys.readouterr().out
    assert "Leaves eat light." in said
    assert "3 sentences" in said
