"""Native decode steps: never stale, left alone where modules differ, the same text as Hugging Face writes."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from twins import transformers

from regard import Attention, Causal, RelativeTable, Strided
from regard.errors import InputError
from regard.kernels import library
from regard.models import GPT, Bert, BertConfig, GPTConfig, explain_decoding
from regard.models.native_decode import NativeDecoder, find_decoder, run_native_step

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=f"no native kernels: {library.missing()}")
SIZES = {"vocab_size": 61, "context_length": 32, "dim": 24, "layers": 2, "heads": 3}


def make(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**(SIZES | changes))).eval()


def step_both(model):
    """Logits by the native step and by the modules."""
    prompt, step = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5]])
    with torch.no_grad():
        made = run_native_step(model, step, model.prefill(prompt, None, 2)[1])
        plain = model(step, cache=model.prefill(prompt, None, 2)[1], last_only=True)[:, 0]
    return made, plain


CHANGES = {
    "in place": lambda model: model.blocks[0].feed_forward.inner.weight.add_(0.3),
    "data in place": lambda model: model.blocks[1].attention.projections.weight.data.mul_(1.7),
    "data": lambda model: setattr(model.embedding.weight, "data", torch.randn(61, 24)),
    "a parameter": lambda model: setattr(model.norm, "weight", nn.Parameter(torch.randn(24))),
    "a module": lambda model: setattr(
        model.blocks[1].feed_forward, "outer", copy.deepcopy(model.blocks[0].feed_forward.outer)
    ),
    "a block": lambda model: model.blocks.__setitem__(1, copy.deepcopy(model.blocks[0])),
    "the output": lambda model: setattr(model, "output", copy.deepcopy(model.output)),
    "a state dict": lambda model: model.load_state_dict(
        {name: 1.3 * tensor for name, tensor in model.state_dict().items()}, assign=True
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_never_stale(change):
    model = make()
    before, _ = step_both(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        CHANGES[change](model)
    made, plain = step_both(model)
    assert not torch.allclose(before, plain, atol=1e-3)
    torch.testing.assert_close(made, plain, rtol=1e-4, atol=1e-5)


def test_a_replaced_parameter_of_one_number_and_replaced_blocks_are_seen():
    model = make(dim=1, heads=1, hidden_dim=3)
    decoder = find_decoder(model)
    model.norm.weight = nn.Parameter(model.norm.weight.detach().clone())  # equal, and another
    assert find_decoder(model) is not decoder
    model = make().quantize("int8")
    decoder = find_decoder(model)
    assert find_decoder(model) is decoder
    weight = model.blocks[1].feed_forward.outer.weight
    weight.parts = copy.deepcopy(make(dim=24).quantize("int8").blocks[0].feed_forward.outer.weight).parts
    assert find_decoder(model) is not decoder


def test_hooks_on_a_module_are_called():
    model, seen = make(), []
    assert step_both(model)[0] is not None
    handle = model.blocks[1].feed_forward.register_forward_hook(lambda *_: seen.append(1))
    assert step_both(model)[0] is None
    model.generate([[1, 2]], max_new_tokens=3)
    assert len(seen) > 3
    handle.remove()
    assert step_both(model)[0] is not None


UNSUPPORTED = {
    "float64": (lambda: make().double(), "float32"),
    "a learned bias": (lambda: make(attention=Attention(bias=RelativeTable(3, 8))), "RelativeTable"),
    "a feature map": (lambda: make(attention=Attention(feature_map="elu1")), "feature map"),
    "half of the biases": (lambda: make(attention_bias="q"), "'q'"),
    "a subclass": (lambda: _with_other_norm(make()), "Other"),
    "training": (lambda: make(dropout=0.1).train(), "training"),
}


def _with_other_norm(model):
    class Other(nn.LayerNorm):
        pass

    model.blocks[0].attention_norm = Other(24)
    return model


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_a_model_that_has_no_native_step_says_why_and_decodes_all_the_same(case):
    build, word = UNSUPPORTED[case]
    model = build()
    reason = find_decoder(model)
    assert isinstance(reason, str)
    assert word in reason
    assert f"one native call: {reason}" in str(explain_decoding(model))
    assert len(model.generate([[1, 2, 3]], max_new_tokens=4).tokens[0]) == 4


def test_a_pattern_with_gaps_is_left_to_the_modules():
    model = make(attention=Attention(pattern=Causal() & Strided(3)))
    made, _ = step_both(model)
    assert made is None
    assert len(model.generate([[1, 2, 3]], max_new_tokens=4).tokens[0]) == 4


def test_gradients_go_through_the_modules():
    model = make()
    cache = model.new_cache(4)
    with torch.no_grad():
        model(torch.tensor([[1, 2]]), cache=cache)
    assert run_native_step(model, torch.tensor([[3]]), cache) is None
    assert run_native_step(model.requires_grad_(False), torch.tensor([[3]]), cache) is not None


@pytest.mark.parametrize("family", ["GPT2", "Llama", "Mistral"])
def test_it_writes_what_hugging_face_writes(family):
    library_ = transformers()
    torch.manual_seed(1)
    sizes = {"vocab_size": 61, "bos_token_id": None, "eos_token_id": None}
    if family == "GPT2":
        config = library_.GPT2Config(n_embd=24, n_layer=2, n_head=3, n_positions=64, **sizes)
    else:
        more = {"hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = getattr(library_, f"{family}Config")(
            num_key_value_heads=2, max_position_embeddings=64, **more, **sizes
        )
        if family == "Mistral":
            config.sliding_window = 6
    peer = getattr(library_, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model = GPT.from_checkpoint(config.to_dict(), peer.state_dict()).eval()
    prompt = torch.tensor([[7, 1, 9, 3, 3], [2, 8, 8, 1, 4]])
    assert isinstance(find_decoder(model), NativeDecoder)
    words = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    with torch.no_grad():
        made = peer.generate(prompt, attention_mask=torch.ones_like(prompt), **words)
        assert model.generate(prompt, max_new_tokens=20).tokens == made[:, 5:].tolist()
        cache = model.prefill(prompt, None, 20)[1]
        for column in range(5, 24):
            step = run_native_step(model, made[:, column : column + 1], cache)
            expected = peer(made[:, : column + 1]).logits[:, -1]
            assert step is not None
            torch.testing.assert_close(step, expected, rtol=1e-4, atol=1e-4)


def test_explain_counts_the_bytes_of_a_token():
    model = GPT(GPTConfig.llama(**(SIZES | {"kv_heads": 1, "window": 7, "window_layers": (0,)}))).eval()
    found = explain_decoding(model, tokens=20, batch=2, bandwidth=1e9)
    matrices = [w for block in model.blocks for w in block.parameters() if w.ndim == 2]
    assert found.weight_bytes == 4 * sum(w.numel() for w in (*matrices, model.output.weight))
    assert found.cache_bytes == 4 * (8 + 20) * (8 + 8)
    assert found.bound == pytest.approx(2e9 / (found.weight_bytes + 2 * found.cache_bytes))
    assert "one native call for all 2 blocks" in str(found)
    with pytest.raises(InputError, match="does not decode"):
        explain_decoding(Bert(BertConfig(vocab_size=11, dim=8, layers=1, heads=2, hidden_dim=8)))


IDLE = """
import time, torch
from regard.models import GPT, GPTConfig
model = GPT(GPTConfig(vocab_size=2001, dim=256, layers=4, heads=4)).eval()
model.generate([[1, 2, 3]], max_new_tokens=8)
time.sleep(0.3)
begin = time.process_time()
time.sleep(1.0)
print(time.process_time() - begin)
"""


@pytest.mark.slow
def test_a_loaded_model_that_waits_uses_no_processor_time():
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    ran = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, env=environment, check=True)
    assert float(ran.stdout) < 0.01
