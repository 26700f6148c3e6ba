"""Where the models of the lab come from: a name, and a function that loads it. The page only ever names their ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from regard import downloads
from regard.lab.kinds import Kind


@dataclass(frozen=True)
class LoadedModel:
    """What a source loads.

    Attributes:
        module: the model.
        tokenizer: of its texts; None for images, and for models without one.
        normalize: from an image `(1, channel, row, column)` of numbers from 0 to 1 to what the model reads.
        class_names: of what a classifier tells apart.
        python: lines that load the same model as `model`, and its tokenizer as `tokenizer`.
    """

    module: nn.Module
    tokenizer: Any = None
    normalize: Callable[[Tensor], Tensor] | None = None
    class_names: Sequence[str] = ()
    python: Sequence[str] = ()


@dataclass(frozen=True)
class Source:
    """A model that can be opened.

    Attributes:
        name: in the list of the page.
        place: what it is, or where it lies.
        load: loads it; called once.
        kind: what it is known to be before it is loaded.
        has_real_weights: whether it was trained.
    """

    name: str
    place: str
    load: Callable[[], LoadedModel] = field(repr=False)
    kind: Kind | None = None
    has_real_weights: bool = False


def number_sources(sources: Iterable[Source]) -> dict[str, Source]:
    """The sources by ids that may stand in an address: their names, with a number where two are equal."""
    found: dict[str, Source] = {}
    for source in sources:
        plain = re.sub(r"[^a-z0-9]+", "-", source.name.lower()).strip("-")[:40] or "model"
        name, number = plain, 2
        while name in found:
            name, number = f"{plain}-{number}", number + 1
        found[name] = source
    return found


KINDS: dict[str, tuple[str, Kind]] = {
    "minilm": ("Bert", "encoder"),
    "rxnfp": ("Bert", "encoder"),
    "smollm2": ("GPT", "decoder"),
    "stories15m": ("GPT", "decoder"),
}


def find_downloaded() -> list[Source]:
    """The models with real weights that `python -m regard.downloads` has fetched to this machine."""
    found = []
    for name, (kind_of_model, kind) in KINDS.items():
        place = downloads.find(name)
        if place is not None:
            title = downloads.WEIGHTS[name].title
            found.append(Source(name, title, _make_loader(name, kind_of_model, place), kind, True))
    return found


def read_reaction_tokenizer(vocabulary: Path) -> Any:
    """The tokenizer of reactions in SMILES, a token for each atom, bond and bracket, from a list of tokens."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.processors import TemplateProcessing

    names = vocabulary.read_text(encoding="utf-8").split()
    numbers = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    # An atom in brackets, an element of two letters, an arrow, a ring of two digits, or one character.
    tokenizer.pre_tokenizer = Split(Regex(r"\[[^\]]+\]|Br|Cl|>>|%\d\d|\S"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = Fuse()  # type: ignore[assignment]
    special = [name for name in ("[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]") if name in numbers]
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]", special_tokens=[(name, numbers[name]) for name in ("[CLS]", "[SEP]")]
    )
    return tokenizer


def _make_loader(name: str, kind_of_model: str, place: Path) -> Callable[[], LoadedModel]:
    def load() -> LoadedModel:
        from regard import models
        from regard.visualize.text_input import find_tokenizer

        model = getattr(models, kind_of_model).from_pretrained(place)
        if name == "rxnfp":
            python = (
                "from regard.downloads import find",
                "from regard.lab.sources import read_reaction_tokenizer",
                "from regard.models import Bert",
                'model = Bert.from_pretrained(find("rxnfp"))',
                'tokenizer = read_reaction_tokenizer(find("rxnfp") / "vocab.txt")',
            )
            return LoadedModel(model, read_reaction_tokenizer(place / "vocab.txt"), python=python)
        python = (
            "from regard.downloads import find",
            f"from regard.models import {kind_of_model}",
            "from regard.visualize.text_input import find_tokenizer",
            f'model = {kind_of_model}.from_pretrained(find("{name}"))',
            f'tokenizer = find_tokenizer(str(find("{name}")))',
        )
        return LoadedModel(model, find_tokenizer(str(place)), python=python)

    return load
