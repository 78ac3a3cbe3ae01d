"""The host passes of the inductor engine, in order."""

from poptorch.engines.host import HostPass
from poptorch.engines.passes.alpha import write_out_alpha
from poptorch.engines.passes.attention import join_attentions
from poptorch.engines.passes.bias import add_biases_last
from poptorch.engines.passes.channels_last import use_channels_last
from poptorch.engines.passes.convolution import separate_bias_gradients
from poptorch.engines.passes.cross_entropy import join_cross_entropies
from poptorch.engines.passes.draw_ahead import draw_ahead
from poptorch.engines.passes.layers import outline_layers
from poptorch.engines.passes.nops import remove_nops
from poptorch.engines.passes.outline import outline_updates
from poptorch.engines.passes.packed_weights import pack_weights
from poptorch.engines.passes.pooling import pool_before_relu
from poptorch.engines.passes.prepare import prepare_weights
from poptorch.engines.passes.print_order import order_prints
from poptorch.engines.passes.scatter import scatter_row_gradients
from poptorch.engines.passes.serialized import write_out_products
from poptorch.engines.passes.turns import take_turns
from poptorch.engines.passes.widen import widen_products

NATIVE: tuple[HostPass, ...] = (
    remove_nops,
    order_prints,
    write_out_products,
    write_out_alpha,
    pool_before_relu,
    separate_bias_gradients,
    scatter_row_gradients,
    widen_products,
    join_attentions,
    join_cross_entropies,
    add_biases_last,
    draw_ahead,
    take_turns,
    use_channels_last,
    pack_weights,
    prepare_weights,
    outline_updates,
    outline_layers,
)

# What makes code or its compilation faster but asks more of Inductor: a second attempt at a program does without.
DARING: tuple[HostPass, ...] = (join_attentions, join_cross_entropies, add_biases_last, pack_weights, outline_layers)
CAREFUL: tuple[HostPass, ...] = tuple(apply for apply in NATIVE if apply not in DARING)
