"""Real checkpoints from registry packages, against the library they were trained with.

The decoders (SmolLM2, stories15M) are held against it in test_gguf.py and test_llama2c.py.
"""

from __future__ import annotations

import json

import pytest
import torch
from twins import library, transformers

from regard.models import Bert
from regard.models.files import packages

# Six and twelve layers in float32, relative to the largest entry.
CLOSE = 1e-4


def folder(name):
    found = packages.find(name)
    if found is None:
        pytest.skip(f"{name} is not here: python -m regard.models.files.fetch {name}")
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


def test_minilm_knows_what_means_the_same():
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
    tokens = torch.randint(0, model.config.vocabulary, (3, 23), generator=generator)
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
