"""Text generation: sampling, beam search, streaming."""

from regard.models.generation.beam import Hypothesis, beam_search
from regard.models.generation.generate import Generation, generate, stream
from regard.models.generation.markov import Markov
from regard.models.generation.penalties import LengthPenalty, PowerPenalty, WuPenalty
from regard.models.generation.protocol import GenerativeModel, HasCache
from regard.models.generation.sampling import Sampler

__all__ = [
    "Generation",
    "GenerativeModel",
    "HasCache",
    "Hypothesis",
    "LengthPenalty",
    "Markov",
    "PowerPenalty",
    "Sampler",
    "WuPenalty",
    "beam_search",
    "generate",
    "stream",
]
