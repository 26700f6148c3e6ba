"""Files that hold weights: safetensors, GGUF, llama2.c, and torch's own read without pickle."""

from regard.models.files.folder import read_checkpoint, write_folder
from regard.models.files.scored_tokenizer import ScoredTokenizer
from regard.models.files.tensors import read_safetensors, read_torch, write_safetensors

__all__ = [
    "ScoredTokenizer",
    "read_checkpoint",
    "read_safetensors",
    "read_torch",
    "write_folder",
    "write_safetensors",
]
