"""Statistics eat pairs and give estimates and verdicts. numpy and scipy only."""

from .decide import Verdict as Verdict
from .decide import Word as Word
from .decide import decide as decide
from .decide import holm as holm
from .decide import minimum_detectable as minimum_detectable
from .decide import sd_interval as sd_interval
from .decide import seeds_needed as seeds_needed
from .decide import sentence as sentence
from .paired import Correlation as Correlation
from .paired import Estimate as Estimate
from .paired import PairTable as PairTable
from .paired import Parts as Parts
from .paired import RatioEstimate as RatioEstimate
from .paired import SignFlip as SignFlip
from .paired import clopper_pearson as clopper_pearson
from .paired import correlation as correlation
from .paired import document_interval as document_interval
from .paired import mean_difference as mean_difference
from .paired import ratio_estimate as ratio_estimate
from .paired import seed_interval as seed_interval
from .paired import sign_flip as sign_flip
