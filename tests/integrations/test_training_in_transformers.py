"""Training with `attn_implementation="regard"`: Trainer, LoRA by PEFT, autocast, and a real BERT on real news."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

import regard
from regard import Window, downloads
from regard.adapters.huggingface_tiny import quiet, tiny

transformers = pytest.importorskip("transformers", reason="the twins are not installed")
import regard.integrations.transformers  # noqa: E402  registers "regard"

IDS = torch.randint(3, 80, (2, 13), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, 13, dtype=torch.long)
MASK[1, 9:] = 0
LABELS = IDS.masked_fill(MASK == 0, -100)


def make_pair(name: str, **fields):
    eager = tiny(name, attention="eager", **fields)
    model = copy.deepcopy(eager)
    model.set_attn_implementation("regard")
    return eager, model


@pytest.mark.filterwarnings("ignore")  # of Trainer, about this machine
def test_trainer_has_the_losses_of_eager_attention(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it; peft brings it")
    texts = [{"input_ids": IDS[n % 2, : 5 + n % 8], "labels": n % 2} for n in range(16)]

    def pad(rows):
        ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
        return {
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }

    curves = []
    for model in make_pair(
        "BertForSequenceClassification", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2
    ):
        settings = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=6,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=1,
            seed=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            gradient_checkpointing=model.config._attn_implementation == "regard",
        )
        with quiet():
            trainer = transformers.Trainer(model, settings, train_dataset=texts, data_collator=pad)
            trainer.train()
        curves.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert len(curves[0]) == 6
    assert curves[0][0] > curves[0][-1]
    torch.testing.assert_close(torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=1e-3, atol=1e-3)


def test_lora_has_the_gradients_and_tokens_of_eager_attention():
    peft = pytest.importorskip("peft", reason="the twins are not installed")
    settings = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    models = [peft.get_peft_model(model.double(), settings) for model in make_pair("LlamaForCausalLM")]
    models[1].load_state_dict(models[0].state_dict())
    tokens = []
    for model in models:
        model(input_ids=IDS, attention_mask=MASK, labels=LABELS).loss.backward()
        with quiet():
            tokens.append(model.generate(input_ids=IDS, max_new_tokens=5, do_sample=False, pad_token_id=0))
    assert torch.equal(*tokens)
    trained = 0
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        if left.grad is not None:
            trained += 1
            torch.testing.assert_close(right.grad, left.grad, rtol=1e-5, atol=1e-6)  # softmax of eager is in float32
    assert trained == 8
    with torch.no_grad():
        before = models[1](input_ids=IDS).logits
        with regard.use(models[1], pattern=Window(2, 0)):
            assert not torch.allclose(models[1](input_ids=IDS).logits, before)
        assert torch.equal(models[1](input_ids=IDS).logits, before)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration", "Gemma2ForCausalLM"])
def test_autocast_trains_as_with_eager_attention(name):
    losses, grads = [], []
    for model in make_pair(name, **({"decoder_start_token_id": 0} if name.startswith("T5") else {})):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=IDS, attention_mask=MASK, labels=LABELS).loss
        loss.backward()
        losses.append(loss.detach())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=2e-2)
    assert float((grads[1] - grads[0]).norm() / grads[0].norm()) < 0.1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_dropout_of_attention_weights(reentrant):
    model = tiny("BertForSequenceClassification", attention="regard", attention_probs_dropout_prob=0.5).double().train()
    embedding = model.get_input_embeddings().weight
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        torch.manual_seed(3)
        model.zero_grad()
        model(IDS, attention_mask=MASK, labels=torch.tensor([0, 1])).loss.backward()
        grads.append(embedding.grad.clone())
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(downloads.find("minilm") is None, reason="python -m regard.downloads minilm")
@pytest.mark.skipif(downloads.find("bbc") is None, reason="regard data bbc")
def test_a_bert_on_bbc_news_has_the_curve_of_sdpa():
    path = Path(__file__).parents[2] / "examples" / "finetune_huggingface.py"
    spec = importlib.util.spec_from_file_location("finetune_huggingface", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    curves = example.main(["--steps", "6", "--tokens", "128"])
    assert set(curves) == {"sdpa", "regard"}
    assert len(curves["regard"]) == 6
    torch.testing.assert_close(torch.tensor(curves["regard"]), torch.tensor(curves["sdpa"]), rtol=0, atol=1e-4)
