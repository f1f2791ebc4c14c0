"""xsalab: whether a change to attention helps, by how much, how surely, and at what cost.

    model.exclude_self         the operation, z = y − α proj_v(y)
    model.variant, Variant     the seam: a change to attention in one file
    optim.Hybrid               Muon for matrices, AdamW for the rest
    experiment.design          what an experiment is, and its cells
    stats.mean_difference      the statistics: paired seeds × documents
    report.write_report        the page

The command line does all of it: ``xsalab run experiments/quick.toml``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model import GPT as GPT
    from .model import ModelConfig as ModelConfig
    from .model import Variant as Variant
    from .model import VariantChoice as VariantChoice
    from .model import exclude_self as exclude_self
    from .model import variant as variant

__version__ = "0.1.0"
__all__ = ["GPT", "ModelConfig", "Variant", "VariantChoice", "exclude_self", "variant"]


def __getattr__(name: str) -> Any:
    """The names above, from ``model`` when they are first asked for: torch takes seconds, and --help needs none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import model

    return getattr(model, name)
