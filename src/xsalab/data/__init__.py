"""Text to rows: sources, tokenizer, packed rows, batches."""

from .corpus import Corpus as Corpus
from .corpus import TokenDocument as TokenDocument
from .corpus import prepare as prepare
from .preparing import prepare_shards as prepare_shards
from .rows import Batch as Batch
from .rows import Rows as Rows
from .rows import batch_at as batch_at
from .rows import nanochat_rows as nanochat_rows
from .sources import DataConfig as DataConfig
from .sources import Document as Document
from .tokenizer import Tokenizer as Tokenizer
