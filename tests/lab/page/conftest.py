"""The lab's own server with small models of every kind, and pages of it in the machine's Chromium."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]
PHONE, DESK = (390, 844), (1440, 900)
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "old", "dog", "fox", "sees", "a", "lazy", ".", "<b>", "&")


def make_encoder():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing

    from regard.lab.sources import LoadedModel
    from regard.models import BertForPretraining, BertForPretrainingConfig

    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]", "[MASK]"])
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    torch.manual_seed(1)
    config = BertForPretrainingConfig(
        vocab_size=len(WORDS), context_length=1031, dim=24, layers=2, heads=3, hidden_dim=29
    )
    return LoadedModel(BertForPretraining(config), tokenizer, python=["model = ...", "tokenizer = ..."])


def make_decoder():
    from regard.lab.sources import LoadedModel
    from regard.models import GPT, GPTConfig
    from regard.train.data.text.characters import ByteTokenizer

    torch.manual_seed(2)
    tokenizer = ByteTokenizer()
    size = tokenizer.vocab_size
    config = GPTConfig(vocab_size=size, context_length=4099, dim=20, layers=3, heads=5, hidden_dim=23)
    return LoadedModel(GPT(config), tokenizer, python=["model = ...", "tokenizer = ..."])


def make_translation():
    from regard.lab.sources import LoadedModel
    from regard.models import Transformer, TransformerConfig
    from regard.train.data.text.characters import ByteTokenizer

    torch.manual_seed(3)
    tokenizer = ByteTokenizer()
    config = TransformerConfig(vocab_size=tokenizer.vocab_size, dim=20, layers=2, heads=2, hidden_dim=23)
    return LoadedModel(Transformer(config), tokenizer, python=["model = ...", "tokenizer = ..."])


def make_image_model():
    from regard.lab.sources import LoadedModel
    from regard.models import ViT, ViTConfig

    torch.manual_seed(4)
    config = ViTConfig(image=(28, 42), patch=7, classes=5, dim=24, layers=2, heads=3, hidden_dim=29)
    return LoadedModel(ViT(config), class_names=["a", "b", "c", "d", "e"], python=["model = ..."])


def make_broken():
    raise RuntimeError("<b>no such file</b>")


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """The address of a running lab."""
    pytest.importorskip("starlette", reason="starlette is not installed: regard[lab]")
    from regard.lab.server import LabServer
    from regard.lab.sources import Source
    from regard.lab.state import Lab

    makers = {"encoder": make_encoder, "decoder": make_decoder, "translation": make_translation}
    sources = [Source(kind, f"a small {kind}", make, kind) for kind, make in makers.items()]
    sources += [Source("picture", "a small ViT", make_image_model, "image"), Source("broken", "nothing", make_broken)]
    server = LabServer(Lab(sources))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.is_running and time.monotonic() < deadline:
        time.sleep(0.02)
    yield server.address
    server.stop()
    thread.join(20)


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: regard[browser]")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("there is no Chromium on this machine: make browser")
    with playwright.sync_playwright() as player:
        opened = player.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield opened
        opened.close()


@dataclass
class Visit:
    """A page that was opened: what it asked for elsewhere, and what it said in the console."""

    context: object
    foreign: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


@pytest.fixture
def visit(browser, lab) -> Iterator[Callable]:
    """Open a view of the lab; afterwards nothing may have been asked for elsewhere, nor said in the console."""
    visits: list[Visit] = []
    origin = lab[: lab.index("/?")]

    def visit(view: str, size=DESK, scheme="light", *, refused: int = 0):
        """`refused` is how many requests the server is expected to refuse; the browser reports each."""
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            reduced_motion="reduce",
            accept_downloads=True,
        )
        context.set_default_timeout(30_000)
        opened = Visit(context)
        visits.append(opened)

        def allow(route):
            if route.request.url.startswith((origin, "data:", "blob:")):
                route.continue_()
            else:
                opened.foreign.append(route.request.url)
                route.abort()

        context.route("**/*", allow)
        page = context.new_page()
        expected = [refused]

        def hear(message):
            if "Failed to load resource" in message.text and expected[0] > 0:
                expected[0] -= 1
            else:
                opened.messages.append(message.text)

        page.on("console", hear)
        page.on("pageerror", lambda error: opened.messages.append(str(error)))
        page.goto(f"{lab}#{view}")
        return page

    yield visit
    for opened in visits:
        opened.context.close()
        assert opened.foreign == []
        assert opened.messages == []


def sideways(page) -> int:
    """How many pixels the page is wider than the screen."""
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
