"""The optimisers: PopTorch's own classes, and the update rules that every optimiser is compiled to."""

from poptorch.optim.attributes import VariableAttributes
from poptorch.optim.optimizer import Optimizer
from poptorch.optim.optimizers import LAMB, SGD, Adam, AdamW, RMSprop

__all__ = ["SGD", "Adam", "AdamW", "RMSprop", "LAMB", "Optimizer", "VariableAttributes"]
