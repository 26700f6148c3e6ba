"""Writing text: sampling, beam search, streaming."""

from regard.models.generation.beam import Hypothesis, beam_search
from regard.models.generation.generate import Generation, generate, stream
from regard.models.generation.markov import Markov
from regard.models.generation.penalties import LengthPenalty, PowerPenalty, WuPenalty
from regard.models.generation.sampling import Sampler
from regard.models.generation.writer import Remembers, Writer

__all__ = [
    "Generation",
    "Hypothesis",
    "LengthPenalty",
    "Markov",
    "PowerPenalty",
    "Remembers",
    "Sampler",
    "Writer",
    "WuPenalty",
    "beam_search",
    "generate",
    "stream",
]
