"""Every architecture of transformers with `attn_implementation="regard"`, held against its eager attention.

An architecture is a model type of the library's registry, built with a tiny random configuration. In float64, logits
and gradients are compared without padding and with padding on either side, then greedy tokens with a growing and with
a static cache. The eager attention of many models computes its softmax in float32; here it keeps float64.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.adapters.huggingface_tiny import MORE, SIZES, _randomize, quiet

ROWS, TOKENS, PADDED = 2, 11, 4
BOUND, LOW_BOUND = 1e-10, 1e-6  # of float64, and of models whose eager attention computes a part in float32
MOST_PARAMETERS, MOST_BY_DEFAULT = 30_000_000, 8_000_000  # with tiny sizes, and with default sizes but for the depth
EXTRA = {"num_channels": 3, "attention_chunk_size": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
EXTRA |= {"topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
EXTRA |= {"v_head_dim": 8, "moe_intermediate_size": 24, "vocab_size_per_layer_input": 89, "audio_vocab_size": 64}
EXTRA |= {"shared_expert_intermediate_size": 24, "hidden_size_per_layer_input": 8, "depth": 2, "out_hidden_size": 32}
EXTRA |= {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "projection_dim": 32, "num_codebooks": 2}
LOCAL_MORE: dict[str, dict[str, Any]] = {
    "Qwen2Moe": {"use_sliding_window": True, "max_window_layers": 1},
    "DeepseekV3": {"head_dim": None, "num_key_value_heads": 4},
    "T5": {"decoder_start_token_id": 0},
    "MT5": {"decoder_start_token_id": 0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
}


# Sizes that are tried in turn where those above make no model that runs: layers for every kind of a hybrid, as many key
# heads as heads, the default sizes of everything but the depth.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_hidden_layers": 4},
    {"num_key_value_heads": 4, "head_dim": None},
    {"only": ("vocab_size", "num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "depth")},
)


@dataclass
class Outcome:
    """What became of one architecture.

    status is "equal", "differs", "refused" (an error, where eager has none), "own attention" (the model never calls the
    registry) or "not built" (there is no tiny model or no input for it).
    """

    model_type: str
    class_name: str
    status: str
    reason: str = ""
    bound: float = BOUND
    checks: list[str] = field(default_factory=list)
    largest: float = 0.0


def list_architectures() -> dict[str, str]:
    """The class to build for each model type of the registry."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    names = (
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        "MODEL_MAPPING_NAMES",
    )
    found: dict[str, str] = {}
    for mapping in (getattr(auto, name, {}) for name in names):
        for model_type, class_name in mapping.items():
            found.setdefault(model_type, class_name if isinstance(class_name, str) else class_name[0])
    return dict(sorted(found.items()))


def check_architecture(model_type: str, class_name: str) -> Outcome:
    """Build a tiny model twice, with eager attention and with ours, and compare all that they return."""
    outcome = Outcome(model_type, class_name, "not built")
    with warnings.catch_warnings(), quiet(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        importlib.import_module("regard.integrations.transformers")
        for variant in VARIANTS:
            try:
                eager = make_model(class_name, variant)
                calls = _make_calls(eager)
                _check_that_it_runs(outcome, eager, calls)
                break
            except Exception as failure:
                outcome.reason = outcome.reason or _describe(failure)
        else:
            return outcome
        try:
            _compare(outcome, eager, calls, variant)
        except Exception as failure:
            outcome.status, outcome.reason = "refused", _describe(failure)
    return outcome


def _check_that_it_runs(outcome: Outcome, eager: Any, calls: dict[str, Any]) -> None:
    """Raises where the model does not run, or gives NaN; calls that pool the tokens lose those with padding before."""
    for name, call in list(calls.items()):
        try:
            finite = bool(torch.isfinite(_run(eager, call)[0]).all())
        except PooledOutput:
            del calls[name]
            continue
        if not finite:
            eager.set_attn_implementation("sdpa")
            outcome.checks.append("against sdpa: eager attention gives NaN")
            if not bool(torch.isfinite(_run(eager, call)[0]).all()):
                raise ValueError("eager attention and sdpa give NaN")


def _compare(outcome: Outcome, eager: Any, calls: dict[str, Any], variant: dict[str, Any]) -> None:
    try:
        ours = copy.deepcopy(eager)
    except RuntimeError:  # a model that keeps states of its last call
        ours = make_model(outcome.class_name, variant)
    ours.set_attn_implementation("regard")
    with count_calls() as count:
        _run(ours, next(iter(calls.values())))
    if not count:
        outcome.status, outcome.reason = "own attention", "the attention table of the library is not read"
        return
    differences = []
    for name, call in calls.items():
        expected, actual = _run(eager, call), _run(ours, call)
        for kind, left, right in zip(("logits", "gradients"), expected, actual, strict=True):
            error = _measure(left, right)
            if BOUND < error <= LOW_BOUND:
                outcome.bound = LOW_BOUND
            bound = outcome.bound if kind == "logits" else 10 * outcome.bound
            outcome.largest = max(outcome.largest, error)
            outcome.checks.append(f"{kind}, {name}")
            if not error <= bound:
                differences.append(f"{kind} with {name}: {error:.1e}")
    differences += _compare_tokens(outcome, eager, ours, calls)
    outcome.status = "differs" if differences else "equal"
    outcome.reason = "; ".join(differences)


# Models


def make_model(class_name: str, variant: dict[str, Any] | None = None) -> Any:
    """A tiny random model in float64, in eval mode, with eager attention."""
    library: Any = importlib.import_module("transformers")
    kind = getattr(library, class_name)
    torch.manual_seed(0)
    config = make_config(kind.config_class, class_name, variant or {})
    with torch.device("meta"):
        parameters = sum(p.numel() for p in kind._from_config(copy.deepcopy(config)).parameters())
    if parameters > (MOST_BY_DEFAULT if "only" in (variant or {}) else MOST_PARAMETERS):
        raise ValueError(f"its tiny configuration has {parameters:,} parameters")
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    _randomize(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "A_log", "dt_bias")) or not bool(torch.isfinite(parameter).all()):
                parameter.normal_(0.0, 0.5)
    return model.double().eval()


def make_config(config_class: Any, class_name: str, variant: dict[str, Any]) -> Any:
    """A tiny configuration; those inside it are tiny too."""
    try:
        default = config_class()
    except Exception:
        default = None
    known = set(inspect.signature(config_class.__init__).parameters)
    values = {} if default is None else default.to_dict()
    aliases = set(getattr(config_class, "attribute_map", {}))
    known = (known | set(values)) - aliases
    sizes = {name: value for name, value in (SIZES | EXTRA).items() if name in known}
    sizes = {name: size for name, size in sizes.items() if _fits(values.get(name), size)}
    for table in (MORE, LOCAL_MORE):
        start = max((s for s in table if class_name.startswith(s)), key=len, default="")
        sizes |= table.get(start, {})
    sizes |= {name: size for name, size in variant.items() if name in known}
    if "only" in variant:
        sizes = {name: size for name, size in sizes.items() if name in variant["only"]}
    for name, inner in getattr(config_class, "sub_configs", {}).items():
        if default is not None and isinstance(getattr(default, name, None), nn.Module | None.__class__):
            continue
        inner_class = type(getattr(default, name)) if default is not None else inner
        sizes[name] = make_config(inner_class, inner_class.__name__, variant)
    sizes = {name: value for name, value in sizes.items() if value is not None}
    if class_name.endswith(("ForCausalLM", "LMHeadModel")) and "is_decoder" in known:
        sizes.setdefault("is_decoder", True)
    config = config_class(**sizes)
    config.use_cache = True
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope and "only" not in variant:
        half = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(half * rope.get("partial_rotary_factor", 1)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return config


def _fits(value: Any, size: Any) -> bool:
    """Whether a size has the kind of the value that it replaces: lists have one entry for each stage."""
    return not isinstance(value, list | tuple | dict | bool) and not (isinstance(value, str))


# Calls


class PooledOutput(ValueError):
    """The output has no axis of tokens, so that it does not show which of them are padding."""


def _make_calls(model: Any) -> dict[str, tuple[dict[str, Tensor], Tensor | None]]:
    """The inputs of some calls, and which positions of their output count."""
    config = model.config
    names = set(inspect.signature(model.forward).parameters)
    random = torch.Generator().manual_seed(1)
    main = model.main_input_name
    if main == "input_ids" or "input_ids" in names:
        text = config.get_text_config()
        words = getattr(text, "vocab_size", 89)
        ids = torch.randint(3, min(words, 80), (ROWS, TOKENS), generator=random)
        inputs: dict[str, Any] = {"input_ids": ids}
        whole = torch.ones(ROWS, TOKENS, dtype=torch.bool)
        calls: dict[str, Any] = {"no padding": (inputs, whole)}
        if config.is_encoder_decoder or "decoder_input_ids" in names:
            inputs["decoder_input_ids"] = torch.randint(3, min(words, 80), (ROWS, TOKENS - 4), generator=random)
            whole = torch.ones(ROWS, TOKENS - 4, dtype=torch.bool)
        if "pixel_values" in names and ("image_embeds" in getattr(model, "_keys", ()) or _needs_pixels(model, inputs)):
            inputs["pixel_values"] = _make_images(config, random)
        if "attention_mask" in names:
            for side in ("left", "right"):
                mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
                mask[1, slice(0, PADDED) if side == "left" else slice(TOKENS - PADDED, TOKENS)] = 0
                counted = whole if "decoder_input_ids" in inputs else mask.bool()
                calls[f"padding on the {side}"] = ({**inputs, "attention_mask": mask}, counted)
        return calls
    if "grid_thw" in names:
        return {"no padding": (_make_patches(config, names, random), None)}
    if main in ("pixel_values", "pixel_values_videos"):
        return {"no padding": ({main: _make_images(config, random)}, None)}
    if main in ("input_features",):
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", 80)
        length = 2 * getattr(config, "max_source_positions", 32)
        shape = (ROWS, bins, length) if "Whisper" in type(model).__name__ else (ROWS, 64, bins)
        inputs = {main: torch.randn(shape, generator=random, dtype=torch.float64)}
    elif main == "input_values":
        inputs = {main: torch.randn(ROWS, 4000, generator=random, dtype=torch.float64)}
    else:
        raise ValueError(f"there is no input of the name {main}")
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, 80, (ROWS, TOKENS - 4), generator=random)
    return {"no padding": (inputs, None)}


def _make_patches(config: Any, names: set[str], random: torch.Generator) -> dict[str, Tensor]:
    """Two images of unequal size as one row of patches, as the vision encoders of Qwen2-VL take them."""
    merge = getattr(config, "spatial_merge_size", 2)
    grid = torch.tensor([[1, 2 * merge, 2 * merge], [1, merge, 2 * merge]])
    channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
    size = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    patches = torch.randn(int(grid.prod(-1).sum()), size, generator=random, dtype=torch.float64)
    return {("pixel_values" if "pixel_values" in names else "hidden_states"): patches, "grid_thw": grid}


def _needs_pixels(model: Any, inputs: dict) -> bool:
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception:
        return True
    return False


def _make_images(config: Any, random: torch.Generator) -> Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32) or 32
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    frames = [config.num_frames] if hasattr(config, "num_frames") else []
    return torch.randn(ROWS, *frames, channels, height, width, generator=random, dtype=torch.float64)


def _run(model: Any, call: tuple[dict[str, Tensor], Tensor | None]) -> tuple[Tensor, list[Tensor | None]]:
    """The first output where it counts, and the gradient of a random functional of it in every parameter."""
    inputs, counted = call
    torch.manual_seed(3)  # some models draw what they mask
    with KeepFloat64():
        output = _first_tensor(model(**inputs))
        if counted is not None and output.shape[: counted.ndim] == counted.shape:
            output = output[counted]
        elif counted is not None and not bool(counted[:, 0].all()):
            raise PooledOutput(f"an output of shape {tuple(output.shape)} does not show which tokens are padding")
        model.zero_grad()
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        (output.double() * direction).sum().backward()
    return output.detach(), [p.grad for p in model.parameters()]


def _first_tensor(output: Any) -> Tensor:
    for name in ("logits", "last_hidden_state", "text_embeds", "logits_per_text"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name)
    values = output if isinstance(output, tuple) else list(output.values())
    return next(value for value in values if isinstance(value, Tensor) and value.is_floating_point())


def _measure(expected: Any, actual: Any) -> float:
    """The largest difference, relative to the largest number."""
    pairs = [(expected, actual)] if isinstance(expected, Tensor) else list(zip(expected, actual, strict=True))
    pairs = [(left, right) for left, right in pairs if left is not None or right is not None]
    worst, largest = 0.0, 1e-30
    for left, right in pairs:
        left = torch.zeros_like(right) if left is None else left
        right = torch.zeros_like(left) if right is None else right
        if left.numel():
            worst = max(worst, float((left - right).abs().max()))
            worst = worst if bool(torch.isfinite(left).all() & torch.isfinite(right).all()) else float("inf")
            largest = max(largest, float(left.abs().max()))
    return worst / largest


# Decoding


def _compare_tokens(outcome: Outcome, eager: Any, ours: Any, calls: dict[str, Any]) -> list[str]:
    if not eager.can_generate():
        return []
    differences = []
    for name, cache in (("no padding", None), ("padding on the left", None), ("padding on the left", "static")):
        if name not in calls:
            continue
        inputs = {key: value for key, value in calls[name][0].items() if not key.startswith("decoder_")}
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        options |= {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
        with KeepFloat64():
            try:
                expected = eager.generate(**inputs, **options)
            except Exception:  # a model without this cache, or without generate for these inputs
                continue
            actual = ours.generate(**inputs, **options)
        label = f"tokens, {name}, {cache or 'growing'} cache"
        outcome.checks.append(label)
        if not torch.equal(expected, actual):
            differences.append(label)
    return differences


class KeepFloat64(TorchFunctionMode):
    """Softmax of float64 stays in float64 where a model asks for float32, and so do casts of attention weights."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (nn.functional.softmax, torch.softmax, Tensor.softmax) and args[0].dtype == torch.float64:
            kwargs.pop("dtype", None)
        return func(*args, **kwargs)


@contextmanager
def count_calls() -> Iterator[list[str]]:
    """The names of the modules that call our attention inside the context."""
    library: Any = importlib.import_module("transformers")
    ours: Any = importlib.import_module("regard.integrations.transformers")
    found: list[str] = []

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found.append(type(module).__name__)
        return ours.attend_in_model(module, *args, **kwargs)

    library.AttentionInterface.register("regard", attend)
    try:
        yield found
    finally:
        ours.register()


def _describe(failure: Exception) -> str:
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text[:160]}"
