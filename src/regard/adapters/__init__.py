"""How to handle a module of torch, Hugging Face, timm, x-transformers, Regard or unknown origin.

`adapt` finds the adapter of a module or function: it draws inputs, calls it, runs it in
pieces with its cache, observes its attention weights, copies it, and runs the other variants that compute the same.
None of the libraries is imported here.
"""

from regard.adapters.base import Adapter, Conventions
from regard.adapters.layer import LayerAdapter
from regard.adapters.model import ImageModelAdapter, ModelAdapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.recognition import adapt

__all__ = ["Adapter", "Conventions", "ImageModelAdapter", "LayerAdapter", "ModelAdapter", "OperatorAdapter", "adapt"]
