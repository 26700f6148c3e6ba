"""Files that hold weights: safetensors, GGUF, llama2.c, and torch's own read without pickle."""

from regard.models.io.folder import read_checkpoint, write_folder
from regard.models.io.sentencepiece_tokenizer import SentencePieceTokenizer
from regard.models.io.tensors import read_safetensors, read_torch, write_safetensors

__all__ = [
    "SentencePieceTokenizer",
    "read_checkpoint",
    "read_safetensors",
    "read_torch",
    "write_folder",
    "write_safetensors",
]
