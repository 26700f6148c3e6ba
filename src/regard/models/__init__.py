"""Models: one readable file each, on top of the layers."""

from regard.models.bert import Bert, BertConfig, BertOutput
from regard.models.bert_heads import (
    BertForClassification,
    BertForClassificationConfig,
    BertForPretraining,
    BertForPretrainingConfig,
)
from regard.models.davit import DaViT, DaViTConfig
from regard.models.decode_explanation import DecodingExplanation, explain_decoding
from regard.models.generation import Generation, generate, stream
from regard.models.gpt import GPT, GPTConfig
from regard.models.resnet import ResNet, ResNetConfig
from regard.models.spatial import SpatialConfig, SpatialTransformer
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.vit import ViT, ViTConfig

__all__ = [
    "GPT",
    "Bert",
    "BertConfig",
    "BertForClassification",
    "BertForClassificationConfig",
    "BertForPretraining",
    "BertForPretrainingConfig",
    "BertOutput",
    "DaViT",
    "DaViTConfig",
    "DecodingExplanation",
    "GPTConfig",
    "Generation",
    "ResNet",
    "ResNetConfig",
    "SpatialConfig",
    "SpatialTransformer",
    "Transformer",
    "TransformerConfig",
    "ViT",
    "ViTConfig",
    "explain_decoding",
    "generate",
    "stream",
]
