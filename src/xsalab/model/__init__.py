"""The network. Imports torch alone and nothing of xsalab outside this folder."""

from .attend import Attend as Attend
from .attend import KVCache as KVCache
from .attend import LayerAttend as LayerAttend
from .config import ModelConfig as ModelConfig
from .controls import HeadGate as HeadGate
from .controls import SelfMasked as SelfMasked
from .controls import Sink as Sink
from .gpt import GPT as GPT
from .gpt import count_parameters as count_parameters
from .init import init_weights as init_weights
from .variant import QKV as QKV
from .variant import Site as Site
from .variant import Variant as Variant
from .variant import VariantChoice as VariantChoice
from .variant import build_variant as build_variant
from .variant import variant as variant
from .xsa import exclude_self as exclude_self
