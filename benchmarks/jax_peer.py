"""JAX as a peer, for the two workloads whose networks are short to write. Imported only where JAX is installed.

Weights and batches come from the PyTorch workload, so the losses can be compared.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.peers import POOL, Runner
from benchmarks.workloads import Workload

RATE, MOMENTUM = 0.01, 0.9  # as in workloads.sgd


def _mlp(w: list[jax.Array], x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ w[0].T + w[1])
    return hidden @ w[2].T + w[3]


def _cnn(w: list[jax.Array], x: jax.Array) -> jax.Array:
    def convolve(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW"))
        return jax.nn.relu(y + bias[:, None, None])

    x = convolve(convolve(x, w[0], w[1]), w[2], w[3])
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return _mlp(w[4:], x.reshape(x.shape[0], -1))


NETWORKS = {"mlp": _mlp, "mlp-b64": _mlp, "cnn-wide": _cnn}


def _weights(workload: Workload) -> list[jax.Array]:
    return [jnp.asarray(p.detach().numpy()) for p in workload.network().parameters()]


def train(workload: Workload) -> Runner:
    """SGD with momentum on the workload's network, one jitted function per step, donated state."""
    network = NETWORKS[workload.name]

    def loss_of(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        picked = jnp.take_along_axis(jax.nn.log_softmax(network(weights, x)), y[:, None], 1)
        return -picked.mean()

    def step(
        state: tuple[list[jax.Array], list[jax.Array]], x: jax.Array, y: jax.Array
    ) -> tuple[tuple[list[jax.Array], list[jax.Array]], jax.Array]:
        weights, buffers = state
        loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
        buffers = [MOMENTUM * buffer + g for buffer, g in zip(buffers, gradients, strict=True)]
        return ([w - RATE * buffer for w, buffer in zip(weights, buffers, strict=True)], buffers), loss

    compiled = jax.jit(step, donate_argnums=0)
    weights = _weights(workload)
    state = weights, [jnp.zeros_like(w) for w in weights]
    batches = [(x.numpy(), y.numpy()) for x, y in workload.batches(POOL)]

    def run(call: int) -> jax.Array:
        nonlocal state
        state, loss = compiled(state, *batches[call % POOL])
        return loss.block_until_ready()

    return Runner(run)


def infer(workload: Workload, size: int) -> Runner:
    network, weights = NETWORKS[workload.name], _weights(workload)
    compiled = jax.jit(lambda x: network(weights, x))
    inputs = [x.numpy() for x, _ in workload.batches(POOL, size)]
    return Runner(lambda call: compiled(inputs[call % POOL]).block_until_ready())
