"""The host passes of the eager engine, in order."""

from poptorch.engines.host import HostPass
from poptorch.engines.passes.convolution import separate_bias_gradients
from poptorch.engines.passes.nops import remove_nops
from poptorch.engines.passes.pooling import pool_before_relu
from poptorch.engines.passes.prepare import prepare_weights
from poptorch.engines.passes.scatter import scatter_row_gradients
from poptorch.engines.passes.widen import widen_products

EAGER: tuple[HostPass, ...] = (
    remove_nops,
    pool_before_relu,
    separate_bias_gradients,
    scatter_row_gradients,
    widen_products,
    prepare_weights,
)
