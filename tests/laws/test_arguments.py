"""The tensors that a call is given, recorded without changing how the call is computed."""

import pytest
import torch
from torch import nn

from regard.adapters import adapt
from regard.laws.arguments import expect_unwritten, record_arguments


class Float64Arguments(nn.Module):
    """Twice the input; hooks would turn it over, as they turn off torch's fused encoder layers."""

    def forward(self, x, mask=None):
        if self._forward_pre_hooks or self._forward_hooks:
            return -2 * x
        if mask is not None and not mask.any():
            mask.fill_(True)
        return 2 * x


def test_a_recorded_module_computes_as_it_does_alone_and_is_left_as_it_was():
    module = Float64Arguments()
    subject, x = adapt(module, "layer", channels=5), torch.randn(2, 3, 5)
    with record_arguments(subject) as arguments:
        output = subject.run(x)
    assert torch.equal(output, 2 * x)
    assert [argument.tensor is x for argument in arguments] == [True]
    assert "forward" not in vars(module)
    assert not module._forward_pre_hooks


def test_a_forward_of_the_instance_itself_is_put_back():
    module = Float64Arguments()
    module.forward = own = lambda x, mask=None: 3 * x
    subject, x = adapt(module, "layer", channels=5), torch.randn(2, 3, 5)
    with record_arguments(subject) as arguments:
        assert torch.equal(subject.run(x), 3 * x)
    assert len(arguments) == 1
    assert module.forward is own


@pytest.mark.parametrize("wrap", [lambda module: module, torch.jit.script], ids=["module", "scripted"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_a_call_writes_into_its_arguments_is_seen(wrap):
    class Adding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1.0)
            return x * 2

    subject, x = adapt(wrap(Adding()), "layer", channels=5), torch.zeros(2, 3, 5)
    with record_arguments(subject) as arguments:
        subject.run(x)
    (written,) = expect_unwritten(arguments)
    assert float((written.actual - written.expected).abs().max()) == 1.0
