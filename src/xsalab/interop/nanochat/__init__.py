"""karpathy/nanochat: reads its checkpoints and tokenizers, and puts XSA into its own training and inference.

``python -m xsalab.interop.nanochat --alpha 1 -- scripts.base_train …`` runs an unmodified checkout (__main__.py).
"""

from .checkpoint import FIELDS as FIELDS
from .checkpoint import NAMES as NAMES
from .checkpoint import VARIANT_FILE as VARIANT_FILE
from .checkpoint import latest_step as latest_step
from .checkpoint import load_weights as load_weights
from .checkpoint import our_name as our_name
from .checkpoint import read_checkpoint as read_checkpoint
from .checkpoint import variant_note as variant_note
from .exclusion import insert_exclusion as insert_exclusion
from .record import record_strengths as record_strengths
from .steps import StepLog as StepLog
from .steps import watch_steps as watch_steps
from .tokenizer import BOS as BOS
from .tokenizer import NanochatTokenizer as NanochatTokenizer
from .tokenizer import read_encoding as read_encoding
