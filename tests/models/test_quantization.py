"""Models with quantised weights: bounds, bits, tied weights, folders, errors; GGUF's blocks as they are stored."""

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twins import transformers

from regard import downloads
from regard.errors import BackendError, CheckpointError, ConfigError
from regard.kernels import library
from regard.kernels.blocks import BLOCK_FORMATS
from regard.kernels.quantized import BlockRows, QuantizedTensor
from regard.models import (
    GPT,
    Bert,
    BertConfig,
    GPTConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
    explain_decoding,
)
from regard.models.io.gguf import read_gguf, read_tokenizer
from regard.models.native_decode import find_decoder, run_native_step
from regard.models.quantization import from_stored

GPT2 = GPTConfig(vocab_size=67, context_length=48, dim=40, layers=3, heads=5)  # 40 channels: blocks have ragged ends
LLAMA = GPTConfig.llama(vocab_size=67, context_length=48, dim=64, layers=2, heads=4, kv_heads=2, hidden_dim=101)
WORDS = ["bf16", "int8", "int4", "q4_0"]


def make(config, seed=0):
    torch.manual_seed(seed)
    return GPT(config).eval()


def assert_near(made, expected):
    """Sums in another order: a number just between two of 8 bits may be rounded to the other, a step of 1 / 127."""
    assert (made - expected).norm() < 0.02 * expected.norm()


@pytest.fixture
def tokens():
    return torch.randint(0, 67, (3, 17), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_logits_differ_by_at_most_the_bound_of_the_rounding(word):
    """A linear model, whose logits are one product: |dlogit_n| <= sum_k |x_k| step_nk / 2 + a_g / 2 sum_k |w_nk|."""
    torch.manual_seed(0)
    layer = GPT(GPTConfig(vocab_size=97, context_length=8, dim=200, layers=1, heads=1)).output
    weight, x = layer.weight.detach().clone(), torch.randn(5, 200)
    quantized = QuantizedTensor.quantize(weight, {"int8": "q8_0", "int4": "q4_1"}[word])
    layer.weight = nn.Parameter(quantized, requires_grad=False)
    groups = F.pad(weight, (0, 24)).unflatten(-1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = torch.maximum(high, -low) / 127 if word == "int8" else (high - low) / 15 + 2**-10 * low.abs()
    steps = (step * (1 + 2**-9) + 2**-23).expand_as(groups).flatten(-2)[:, :200]
    scales = (F.pad(x, (0, 24)).unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127).expand(-1, -1, 32)
    bound = F.linear(x.abs(), steps / 2) + F.linear(scales.flatten(-2)[:, :200] / 2, quantized.dequantize().abs())
    with torch.no_grad():
        error = (layer(x) - F.linear(x.double(), weight.double())).abs()
    assert (error <= bound).all()
    assert error.max() > bound.max() / 100


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("word", WORDS)
def test_a_quantised_model_is_nearly_the_model(config, word, tokens):
    model = make(config)
    with torch.no_grad():
        exact = model(tokens)
        assert model.quantize(word) is model
        made = model(tokens)
    error = (made - exact).norm() / exact.norm()
    assert error < {"bf16": 0.01, "int8": 0.02, "int4": 0.2, "q4_0": 0.3}[word]
    assert model.is_quantized
    assert not any(parameter.requires_grad for parameter in model.parameters())
    tied = model.output.weight is model.embedding.weight
    assert tied == config.tie_embeddings
    assert isinstance(model.blocks[0].attention.projections.weight, QuantizedTensor)


@pytest.mark.parametrize("word", WORDS)
def test_prefill_and_decode_agree_and_bits_do_not_depend_on_the_batch(word, tokens):
    model = make(LLAMA).quantize(word)
    with torch.no_grad():
        whole = model(tokens)
        for row in range(3):
            alone = model(tokens[row : row + 1])
            if word != "bf16":  # torch multiplies many rows in bfloat16
                assert torch.equal(alone[0], whole[row])
        _, cache = model.prefill(tokens[:, :11], capacity=6)
        for place in range(11, 17):
            step = model.decode_step(tokens[:, place : place + 1], cache)
            assert_near(step, whole[:, place])


def test_every_kind_of_model_runs_quantised():
    torch.manual_seed(0)
    bert = Bert(BertConfig(vocab_size=61, context_length=32, dim=48, layers=2, heads=4)).eval()
    vit = ViT(ViTConfig(image=(32, 24), patch=8, dim=48, layers=2, heads=4, classes=7)).eval()
    nn.init.normal_(vit.head.weight)
    transformer = Transformer(TransformerConfig(vocab_size=61, dim=48, heads=4, layers=2, hidden_dim=96)).eval()
    words, image = torch.randint(0, 50, (2, 9)), torch.randn(2, 3, 32, 24)
    runs = {bert: lambda m: m(words), vit: lambda m: m(image), transformer: lambda m: m(words, words[:, :5])}
    for model, run in runs.items():
        with torch.no_grad():
            exact = _tensor(run(model))
            made = _tensor(run(model.quantize("int8")))
        assert (made - exact).norm() / exact.norm() < 0.03


def _tensor(output):
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.mark.parametrize("word", WORDS)
def test_folders_keep_blocks(tmp_path, word, tokens):
    model = make(GPT2).quantize(word)
    model.save_pretrained(tmp_path / "saved")
    again = GPT.from_pretrained(tmp_path / "saved")
    plain = GPT.from_pretrained(tmp_path / "saved", quantized=False)
    assert again.is_quantized
    assert again.output.weight is again.embedding.weight
    assert not plain.is_quantized
    with torch.no_grad():
        assert torch.equal(again(tokens), model(tokens))
        assert torch.equal(plain(tokens), copy.deepcopy(model).dequantize()(tokens))
    size, whole = (tmp_path / "saved" / "model.safetensors").stat().st_size, sum(p.numel() for p in model.parameters())
    assert size < (2.5 if word == "bf16" else 2.2) * whole + 8000


def test_a_matrix_of_several_formats_is_one(tmp_path, tokens):
    model = make(LLAMA)
    weight = model.blocks[0].attention.projections.weight.detach()
    halves = [QuantizedTensor.quantize(weight[:65], "q4_1"), QuantizedTensor.quantize(weight[65:], "q8_0")]
    mixed = torch.cat(halves)
    assert mixed.formats == ("q4_1", "q8_0")
    assert torch.equal(mixed.dequantize(), torch.cat([half.dequantize() for half in halves]))
    assert torch.equal(mixed.rows_at(torch.tensor([3, 64, 65, 70])), mixed.dequantize()[[3, 64, 65, 70]])
    model.blocks[0].attention.projections.weight = nn.Parameter(mixed, requires_grad=False)
    model.quantize("int8").save_pretrained(tmp_path / "mixed")
    with torch.no_grad():
        assert torch.equal(GPT.from_pretrained(tmp_path / "mixed")(tokens), model(tokens))


def test_a_copy_is_independent_and_dequantised_weights_train(tokens):
    model = make(GPT2).quantize("int4")
    twin = copy.deepcopy(model).dequantize().train()
    assert all(parameter.requires_grad for parameter in twin.parameters())
    assert twin.output.weight is twin.embedding.weight
    twin(tokens).sum().backward()
    assert twin.output.weight.grad is not None
    assert model.is_quantized


def test_errors_say_what_to_do(tmp_path, tokens):
    model = make(GPT2)
    with pytest.raises(ConfigError, match=r"int3[\s\S]*known are bf16, int8[\s\S]*quantize\(\"int8\"\)"):
        model.quantize("int3")
    assert not model.is_quantized
    with torch.no_grad():
        model.blocks[1].feed_forward.inner.weight[3, 5] = torch.nan
    with pytest.raises(ConfigError, match=r"blocks.1.feed_forward.inner.weight cannot be quantised"):
        model.quantize("int8")
    assert not model.is_quantized
    model = make(GPT2).quantize("int8")
    with pytest.raises(ConfigError, match=r"cannot be trained[\s\S]*dequantize\(\)"):
        model.train()
    with pytest.raises(BackendError, match=r"no gradient[\s\S]*dequantize\(\)"):
        model.blocks[0].feed_forward.inner(torch.ones(1, 40, requires_grad=True))
    with pytest.raises(BackendError, match=r"cannot be changed[\s\S]*dequantize\(\)"), torch.no_grad():
        model.output.weight.add_(1)
    with pytest.raises(BackendError, match=r"no other dtype[\s\S]*dequantize\(\)"):
        model.half()
    with pytest.raises(CheckpointError, match=r"cannot be written in the layout 'huggingface'[\s\S]*dequantize\(\)"):
        model.save_pretrained(tmp_path, layout="huggingface")


def test_a_damaged_description_of_blocks_is_refused(tmp_path):
    make(GPT2).quantize("int8").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    name = next(iter(config["quantization"]))
    for wrong in ([], [["q9_9", 67, 40]], [["q8_0", 66, 40]], [["q4_1", 67, 40]], [["q8_0", -1, 40]], "q8_0", None):
        damaged = config | {"quantization": config["quantization"] | {name: wrong}}
        (tmp_path / "config.json").write_text(json.dumps(damaged))
        with pytest.raises(CheckpointError, match="do not fit their description"):
            GPT.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="do not fit their description"):
        from_stored({}, ["q8_0"], "a test")


def test_tracing_and_vmap_go_through_the_operator():
    weight = QuantizedTensor.quantize(torch.randn(13, 70), "q4_1")
    x = torch.randn(2, 3, 70)
    with torch.no_grad():
        assert torch.equal(torch.func.vmap(lambda one: F.linear(one, weight))(x), F.linear(x, weight))
    torch.library.opcheck(torch.ops.regard.quantized_linear.default, (x, weight.parts[0].data, None, "q4_1"))


@pytest.mark.skipif(
    downloads.find("smollm2") is None, reason="SmolLM2 is not downloaded: python -m regard.downloads smollm2"
)
def test_smollm2_runs_from_its_blocks_as_they_are_stored():
    path = downloads.find("smollm2")
    exact, model = GPT.from_pretrained(path), GPT.from_pretrained(path, quantized=True)
    formats = {each for p in model.parameters() if isinstance(p, QuantizedTensor) for each in p.formats}
    assert formats == {"q4_1", "q8_0"}
    matrices = {name: p for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    weights = dict(exact.named_parameters())
    for name in list(matrices)[:5]:  # every number is that of the package gguf
        assert torch.equal(matrices[name].dequantize(), weights[name])
    tokens = torch.tensor([[504, 3575, 282, 4649, 314]])  # "The capital of France is"
    with torch.no_grad():
        ours, theirs = model(tokens), exact(tokens)
    assert (ours - theirs).norm() / theirs.norm() < 0.05
    assert ours[0, -1].argmax() == theirs[0, -1].argmax()


def random_blocks(rows, cols, format, seed):
    """Blocks of any bytes, with scales of the size that weights have."""
    make = torch.Generator().manual_seed(seed)
    numbers, size = BLOCK_FORMATS[format]
    data = torch.randint(0, 256, (rows, cols // numbers, size), generator=make, dtype=torch.uint8)
    for at in {"q4_k": (0, 2), "q6_k": (208,)}[format]:
        scale = torch.rand(rows, cols // numbers, 1, generator=make) * 1e-4 + 1e-4
        data[..., at : at + 2] = scale.half().view(torch.uint8)
    return QuantizedTensor([BlockRows(format, data.flatten(1))], cols)


def make_mixed():
    """Matrices as llama.cpp's mixtures have them: values in another format than queries and keys, gate and up too."""
    sizes = {"vocab_size": 67, "context_length": 48, "dim": 256, "layers": 2, "heads": 4}
    model = make(GPTConfig.llama(**sizes | {"hidden_dim": 515, "bias": True}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.quantize("int8")

    def put(module, *formats):
        rows, cols = module.weight.shape
        cuts = [rows * number // len(formats) for number in range(len(formats) + 1)]
        parts = [
            random_blocks(end - begin, cols, format, end)
            if format in ("q4_k", "q6_k")
            else QuantizedTensor.quantize(0.02 * torch.randn(end - begin, cols), format)
            for format, begin, end in zip(formats, cuts, cuts[1:], strict=False)
        ]
        module.weight = nn.Parameter(torch.cat(parts), requires_grad=False)

    put(model.blocks[0].attention.projections, "q4_k", "q4_1", "q6_k")
    put(model.blocks[1].attention.projections, "q4_0", "bf16")
    put(model.blocks[0].feed_forward.inner, "q6_k", "q4_k")
    put(model.blocks[0].feed_forward.outer, "q4_1")
    return model


@pytest.mark.parametrize("threads_", [1, 2])
def test_the_native_step_reads_matrices_of_several_formats(threads_, tokens):
    model = make_mixed()
    found = explain_decoding(model)
    assert found.reason is None
    assert set(found.formats) == {"q4_k", "q4_1", "q6_k", "q4_0", "bfloat16", "q8_0"}
    before = torch.get_num_threads()
    torch.set_num_threads(threads_)
    try:
        with torch.no_grad():
            native, plain = (model.prefill(tokens[:, :11], capacity=6)[1] for _ in range(2))
            for place in range(11, 17):
                made = run_native_step(model, tokens[:, place : place + 1], native)
                expected = model(tokens[:, place : place + 1], cache=plain, last_only=True)[:, 0]
                assert made is not None
                assert_near(made, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("format", ["bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k"])
def test_the_native_step_looks_tokens_up_in_a_table_of_blocks(format, tokens):
    """The same bits as those of embeddings that torch has made of the blocks."""
    cols = 256 if format.endswith("k") else 40
    model = make(GPTConfig(vocab_size=67, context_length=48, dim=cols, layers=1, heads=2, tie_embeddings=False))
    table = (
        random_blocks(67, cols, format, 5) if cols == 256 else QuantizedTensor.quantize(torch.randn(67, cols), format)
    )
    model.embedding.weight = nn.Parameter(table, requires_grad=False)
    model.requires_grad_(False)
    decoder = find_decoder(model)
    assert decoder.embedding is not None
    cache, other = (model.prefill(tokens[:, :5], capacity=3)[1] for _ in range(2))
    step = tokens[:, 5:6]
    made = decoder.run(step, None, cache)
    assert torch.equal(made, decoder.run(step, model.embed_step(step, other)[:, 0], other))


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("word", WORDS)
def test_the_native_decode_step_reads_blocks(config, word, tokens):
    model = make(config).quantize(word)
    assert explain_decoding(model).reason is None
    with torch.no_grad():
        _, cache = model.prefill(tokens[:, :11], capacity=6)
        _, other = model.prefill(tokens[:, :11], capacity=6)
        for place in range(11, 17):
            native = model.decode_step(tokens[:, place : place + 1], cache)
            plain = model(tokens[:, place : place + 1], cache=other, last_only=True)[:, 0]
            assert_near(native, plain)


# A real model on real text

needs_smollm2 = pytest.mark.skipif(
    downloads.find("smollm2") is None, reason="SmolLM2 is not downloaded: python -m regard.downloads smollm2"
)
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered the rightful property of "
    "some one or other of their daughters. The river had risen in the night, and by morning the lower field was under "
    "water. Two boys in a flat boat pushed along the hedge with poles, calling to one another, while their father "
    "counted the sheep on the hill and found that none was missing."
)


def find_losses(model, ids):
    """Cross-entropy of each next token, and the logits."""
    with torch.no_grad():
        logits = model(ids)
    return F.cross_entropy(logits[0, :-1], ids[0, 1:]), logits


@needs_smollm2
@pytest.mark.slow
@pytest.mark.parametrize(("word", "most"), [("bf16", 0.01), ("int8", 0.02), ("int4", 0.03), ("stored", 0.02)])
def test_a_real_model_loses_little_on_real_text(word, most):
    """Cross-entropy may rise by `most` nats a token, which is the relative rise of the perplexity."""
    path = downloads.find("smollm2")
    ids = torch.tensor([read_tokenizer(path).encode(TEXT).ids])
    exact, logits = find_losses(GPT.from_pretrained(path), ids)
    model = GPT.from_pretrained(path, quantized=True) if word == "stored" else GPT.from_pretrained(path).quantize(word)
    loss, others = find_losses(model, ids)
    assert abs(loss - exact) < most
    assert (others - logits).square().mean().sqrt() < 0.02 * logits.abs().max()
    assert (others.argmax(-1) == logits.argmax(-1)).float().mean() > 0.9


@needs_smollm2
@pytest.mark.slow
def test_a_real_model_writes_the_text_of_transformers_and_quantised_a_likely_one():
    path, hugging = downloads.find("smollm2"), transformers()
    config, state = read_gguf(path)
    with torch.device("meta"):
        twin = hugging.LlamaForCausalLM(hugging.LlamaConfig(**config))
    twin.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    twin.model.rotary_emb = type(twin.model.rotary_emb)(twin.config)  # its buffer has no values on meta
    tokenizer, count = read_tokenizer(path), 32
    prompt = torch.tensor([tokenizer.encode("The capital of France is").ids])
    length = prompt.shape[1]
    exact = GPT.from_pretrained(path)
    ours = exact.generate(prompt, max_new_tokens=count).tokens
    with torch.no_grad():  # the best token at every place is the next one: so this is what it would have written
        best = twin.eval()(torch.cat([prompt, torch.tensor(ours)], 1)).logits[:, length - 1 : -1].argmax(-1)
    assert ours == best.tolist()

    def judge(tokens):
        whole = torch.cat([prompt, torch.tensor(tokens)], 1)
        with torch.no_grad():
            return float(F.cross_entropy(exact(whole)[0, length - 1 : -1], whole[0, length:]))

    greedy = judge(ours)
    for model in (GPT.from_pretrained(path, quantized=True), GPT.from_pretrained(path).quantize("int8")):
        made = model.generate(prompt, max_new_tokens=count).tokens
        assert tokenizer.decode(made[0]).startswith(" Paris")
        assert judge(made) < greedy + 0.3  # nats a token
    shuffled = torch.tensor(ours)[:, torch.randperm(count, generator=torch.Generator().manual_seed(0))].tolist()
    assert judge(shuffled) > greedy + 1


MEMORY = """
import gc, sys, tempfile
from regard.models import GPT, GPTConfig

def used():
    gc.collect()
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

def write(model):
    model.generate([[1, 2, 3, 4]], max_new_tokens=16)
    return model

with tempfile.TemporaryDirectory() as folder:  # what libraries need once
    small = GPT(GPTConfig.llama(vocab_size=99, context_length=64, dim=64, layers=2, heads=2)).quantize("int4")
    write(small).save_pretrained(folder)
    write(GPT.from_pretrained(folder))
before = used()
model = write(GPT.from_pretrained(sys.argv[1], quantized=True))
print(used() - before)
"""


@needs_smollm2
@pytest.mark.slow
@pytest.mark.skipif(
    library.missing() is not None or not sys.platform.startswith("linux"), reason="reads /proc; needs the kernels"
)
def test_a_process_grows_by_little_more_than_the_file_it_loads():
    path = downloads.find("smollm2")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", MEMORY, str(path)]
    ran = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    assert float(ran.stdout) <= 1.3 * path.stat().st_size
