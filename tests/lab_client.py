"""A lab on a loopback port with small models of several libraries, and a client that speaks to it."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from twins import library, transformers

pytest.importorskip("starlette", reason="the extra lab is not installed")
pytest.importorskip("uvicorn", reason="the extra lab is not installed")

from regard.lab.server import LabServer
from regard.lab.sources import LoadedModel
from regard.lab.state import Lab
from regard.models import GPT, DaViT, DaViTConfig, GPTConfig, Transformer, TransformerConfig, ViT, ViTConfig

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", ".", "dog", "a", "ran", "<b>")


class Reply(NamedTuple):
    """A status, the headers, and the JSON of the body, or its lines."""

    status: int
    headers: dict[str, str]
    content: Any


class Client:
    """Requests to one server, each on a connection of its own."""

    def __init__(self, server: LabServer) -> None:
        self.server = server

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        given = {"X-Regard-Token": self.server.token, "Content-Type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        given = {name: value for name, value in given.items() if value != "-"}
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        try:
            connection.request(method, path, body, given)
            answer = connection.getresponse()
            data = answer.read()
            kind = answer.headers.get("content-type", "")
            found: Any = data
            if kind.startswith("application/json") and data:  # the answer to HEAD has none
                found = json.loads(data)
            elif kind.startswith("application/x-ndjson"):
                found = [json.loads(line) for line in data.splitlines()]
            return Reply(answer.status, {name.lower(): value for name, value in answer.headers.items()}, found)
        finally:
            connection.close()

    def post(self, name: str, **fields: Any) -> Any:
        """The result of a request that is answered."""
        reply = self.send("POST", f"/api/{name}", json.dumps(fields).encode())
        assert reply.status == 200, reply.content
        if isinstance(reply.content, list):
            assert "result" in reply.content[-1], reply.content[-1]
            return reply.content[-1]["result"]
        return reply.content

    def refuse(self, name: str, **fields: Any) -> tuple[int, dict[str, str]]:
        """The status and the parts of the error of a request that is refused."""
        reply = self.send("POST", f"/api/{name}", json.dumps(fields).encode())
        content = reply.content[-1] if isinstance(reply.content, list) else reply.content
        assert "error" in content, content
        return reply.status, content["error"]

    def upload(self, model: str, content: bytes, name: str = "image.png") -> Reply:
        edge = "----edge"
        parts = (
            f'--{edge}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n'.encode(),
            f'--{edge}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n'.encode(),
            b"Content-Type: image/png\r\n\r\n" + content + f"\r\n--{edge}--\r\n".encode(),
        )
        return self.send("POST", "/api/input", b"".join(parts), Content_Type=f"multipart/form-data; boundary={edge}")


def decode(array: dict[str, Any]) -> Tensor:
    """An array of an answer as a tensor."""
    kinds = {"uint8": np.uint8, "float32": np.float32}
    found = np.frombuffer(base64.b64decode(array["data"]), kinds[array["dtype"]]).reshape(array["shape"])
    return torch.from_numpy(found.copy())


def make_tokenizer() -> Any:
    """A tokenizer of whole words, with the special tokens of BERT."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    numbers = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(list(WORDS[:5]))
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return tokenizer


def make_bert() -> nn.Module:
    library = transformers()
    config = library.BertConfig(
        vocab_size=len(WORDS), hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37,
        max_position_embeddings=61,
    )  # fmt: skip
    return library.BertForMaskedLM(config).eval()


def make_bart() -> nn.Module:
    library = transformers()
    config = library.BartConfig(
        vocab_size=len(WORDS), d_model=20, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=4, encoder_ffn_dim=23, decoder_ffn_dim=29, max_position_embeddings=41,
        pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=3, forced_eos_token_id=3,
    )  # fmt: skip
    return library.BartForConditionalGeneration(config).eval()


def make_llama() -> nn.Module:
    library = transformers()
    config = library.LlamaConfig(
        vocab_size=67, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=31, max_position_embeddings=127,
    )  # fmt: skip
    return library.LlamaForCausalLM(config).eval()


def make_timm() -> nn.Module:
    timm = library("timm")
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=(24, 32), patch_size=8, depth=2, embed_dim=24, num_heads=3, num_classes=7
    ).eval()


class Bomb(nn.Module):
    """Raises whatever it is told to, once the token 3 is in its input."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        if bool((tokens == 9).any()):
            raise self.kind("it blew up")
        x = self.embedding(tokens)
        return self.attention(x, x, x, need_weights=False)[0]


class Slow(nn.Module):
    """Many layers that take their time, and count how many of them ran."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 8)
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(60))
        self.ran = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if tokens.shape[1] > 6:
                time.sleep(0.05)
                self.ran += 1
            x = x + layer(x, x, x, need_weights=False)[0]
        return x


def make_gpt() -> GPT:
    config = GPTConfig(vocab_size=67, context_length=4096, dim=24, layers=2, heads=6, kv_heads=2, position="rotary")
    return GPT(config).eval()


def make_vit() -> ViT:
    config = ViTConfig(image=(12, 20), channels=1, patch=4, classes=5, dim=12, layers=2, heads=3, hidden_dim=17)
    model = ViT(config).eval()
    for parameter in model.parameters():  # a new head has no weights, and predicts every class alike
        nn.init.normal_(parameter, std=0.3)
    return model


MAKERS: dict[str, Callable[[], LoadedModel]] = {
    "gpt": lambda: LoadedModel(make_gpt(), python=["model = ..."]),
    "bert": lambda: LoadedModel(make_bert(), make_tokenizer()),
    "bart": lambda: LoadedModel(make_bart(), make_tokenizer()),
    "llama": lambda: LoadedModel(make_llama()),
    "timm": lambda: LoadedModel(make_timm()),
    "ours": lambda: LoadedModel(
        Transformer(TransformerConfig(vocab_size=31, dim=12, layers=2, heads=3, hidden_dim=19)).eval()
    ),
    "vit": lambda: LoadedModel(make_vit(), class_names=("ant", "bee", "cow", "doe", "elk")),
    "davit": lambda: LoadedModel(
        DaViT(DaViTConfig(classes=5, dims=(12, 16, 20, 24), heads=(2, 2, 2, 2), depths=(1, 1, 1, 1), window=3)).eval()
    ),
    "torch": lambda: LoadedModel(Bomb(ValueError).eval()),
    "exit": lambda: LoadedModel(Bomb(SystemExit).eval()),
    "slow": lambda: LoadedModel(Slow().eval()),
}


def run_server(lab: Lab) -> Iterator[LabServer]:
    """A server in a thread of its own, until the test is over."""
    running = LabServer(lab)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not running.is_running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert running.is_running
    yield running
    running.stop()
    thread.join(30)
    assert not thread.is_alive()
