"""A few real digits, and one thread: everything here is small."""

import pytest
import torch

from regard.train.data import Images, ImageSplit, digits


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def few() -> Images:
    whole = digits()
    parts = ((whole.train, 97), (whole.test, 41))
    return Images("few", *(ImageSplit(p.pixels[:n], p.labels[:n], p.white) for p, n in parts), names=whole.names)
