"""One loop, and checkpoints that are complete or not there."""

from .loop import Diverged as Diverged
from .loop import Hook as Hook
from .loop import StepMetrics as StepMetrics
from .loop import TrainConfig as TrainConfig
from .loop import TrainState as TrainState
from .loop import train as train
from .loop import train_step as train_step
