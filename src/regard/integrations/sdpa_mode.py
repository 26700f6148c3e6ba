"""A mode in which torch's own attention functions are computed by Regard.

    with regard.sdpa():
        model(x)

Inside, each call of `torch.nn.functional.scaled_dot_product_attention` on the CPU goes to `attend`; torch itself is not
changed, and other threads are not affected.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from regard.adapters.override import Override
from regard.integrations.multihead import MULTIHEAD, attend_multihead, takes_multihead
from regard.integrations.scaled_dot_product import (
    attend_like_sdpa,
    find_reason_for_torch,
    refuse_subclasses,
)

SDPA = nn.functional.scaled_dot_product_attention


class sdpa(TorchFunctionMode):
    """A mode in which `scaled_dot_product_attention` on the CPU is computed by Regard, forward and backward.

        >>> query, key, value = torch.randn(3, 1, 2, 5, 8)
        >>> with sdpa() as mode:
        ...     output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        >>> mode.calls
        1

    Masks of booleans and of scores, `is_causal` (aligned with the first key, as torch has it), `dropout_p`, `scale`,
    `enable_gqa` and autocast have torch's meaning, and the output has torch's strides. A query that may see nothing
    gives zeros, also where all its scores in a mask are the lowest number of the dtype. torch's own are: calls under
    torch.compile, on other devices, with nested tensors and other subclasses (a `CausalBias`), and all that torch
    refuses. `nn.MultiheadAttention` is included, except for calls that ask for weights.

    Attributes:
        calls: how many calls were computed by Regard.
    """

    def __init__(self, override: Override | None = None) -> None:
        super().__init__()
        self.calls = 0
        self._override = override

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is SDPA:
            return self._attend(args, kwargs)
        if func is MULTIHEAD:  # as a whole: torch calls it outside of the mode
            bound = inspect.signature(MULTIHEAD).bind(*args, **kwargs)
            bound.apply_defaults()
            if takes_multihead(bound.arguments):
                self.calls += 1
                return attend_multihead(self._override, **bound.arguments)
        return func(*args, **kwargs)

    def _attend(self, args: tuple, kwargs: dict) -> Any:
        # With a change of pattern, bias or scale torch cannot help: `attend` runs, or says why it cannot.
        if self._override is None:
            complete = len(args) + len(kwargs) >= 3
            if not complete or find_reason_for_torch(*args, **kwargs) is not None:
                return SDPA(*args, **kwargs)
        else:
            refuse_subclasses(*args, *kwargs.values())
        self.calls += 1
        return attend_like_sdpa(*args, **kwargs, override=self._override)
