"""JAX as a peer, for the workloads whose networks are short to write. Imported only where JAX is installed.

Weights and batches come from the PyTorch workload, so the losses can be compared. Networks take the weights in the
order of `module.parameters()`.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true intra_op_parallelism_threads=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.peers import POOL, Runner
from benchmarks.workloads import Workload, adamw, sgd

Weights = list[jax.Array]


# ---- networks


def _linear(w: Weights, x: jax.Array) -> jax.Array:
    return x @ w[0].T + w[1]


def _mlp(w: Weights, x: jax.Array) -> jax.Array:
    return _linear(w[2:], jax.nn.relu(_linear(w, x)))


def _convolve(w: Weights, x: jax.Array, padding: str) -> jax.Array:
    y = lax.conv_general_dilated(x, w[0], (1, 1), padding, dimension_numbers=("NCHW", "OIHW", "NCHW"))
    return jax.nn.relu(y + w[1][:, None, None])


def _pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def _cnn(w: Weights, x: jax.Array) -> jax.Array:
    x = _pool(_convolve(w, x, "SAME"))
    x = _pool(_convolve(w[2:], x, "SAME"))
    return _mlp(w[4:], x.reshape(x.shape[0], -1))


def _wide_cnn(w: Weights, x: jax.Array) -> jax.Array:
    x = _pool(_convolve(w[2:], _convolve(w, x, "VALID"), "VALID"))
    return _mlp(w[4:], x.reshape(x.shape[0], -1))


def _embedding(w: Weights, x: jax.Array) -> jax.Array:
    return _mlp(w[1:], w[0][x].reshape(x.shape[0], -1))


def _lstm(w: Weights, x: jax.Array) -> jax.Array:
    of_input, of_hidden, bias = w[0].T, w[1].T, w[2] + w[3]
    start = jnp.zeros((x.shape[0], of_hidden.shape[0]))

    def cell(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        hidden, memory = carry
        i, f, g, o = jnp.split(x + hidden @ of_hidden, 4, axis=1)
        memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(memory), memory), None

    (hidden, _), _ = lax.scan(cell, (start, start), (x @ of_input + bias).swapaxes(0, 1))
    return _linear(w[4:], hidden)


NETWORKS = {
    "mlp": _mlp,
    "mlp-b64": _mlp,
    "embedding-sgd": _embedding,
    "embedding-adamw": _embedding,
    "cnn": _cnn,
    "cnn-wide": _wide_cnn,
    "lstm": _lstm,
}


# ---- optimisers: the state before the first step, and (weights, gradients, state) → weights, state


def _sgd(weights: Weights, gradients: Weights, state: Any) -> tuple[Weights, Any]:
    momenta = [0.9 * m + g for m, g in zip(state, gradients, strict=True)]
    return [w - 0.01 * m for w, m in zip(weights, momenta, strict=True)], momenta


def _adamw(weights: Weights, gradients: Weights, state: Any) -> tuple[Weights, Any]:
    step, means, squares = state
    step = step + 1
    means = [0.9 * m + 0.1 * g for m, g in zip(means, gradients, strict=True)]
    squares = [0.999 * s + 0.001 * g * g for s, g in zip(squares, gradients, strict=True)]

    def update(w: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        size = jnp.sqrt(square) / jnp.sqrt(1 - 0.999**step) + 1e-8
        return w * (1 - 3e-4 * 0.01) - 3e-4 / (1 - 0.9**step) * mean / size

    return [update(*three) for three in zip(weights, means, squares, strict=True)], (step, means, squares)


def _optimizer(workload: Workload, weights: Weights) -> tuple[Any, Any]:
    """The state and the function that compute what the workload's optimiser computes."""

    def zeros() -> Weights:
        return [jnp.zeros_like(w) for w in weights]

    return {sgd: (zeros(), _sgd), adamw: ((jnp.zeros(()), zeros(), zeros()), _adamw)}[workload.optimizer_factory]


# ---- the peer


def train(workload: Workload) -> Runner:
    """One jitted function per step, with donated state."""
    network, weights = NETWORKS[workload.name], _weights(workload)
    state, update = _optimizer(workload, weights)

    def loss_of(weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
        picked = jnp.take_along_axis(jax.nn.log_softmax(network(weights, x)), y[:, None], 1)
        return -picked.mean()

    def step(weights: Weights, state: Any, x: jax.Array, y: jax.Array) -> tuple[Weights, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(weights, x, y)
        return *update(weights, gradients, state), loss

    compiled = jax.jit(step, donate_argnums=(0, 1))
    batches = [(x.numpy(), y.numpy()) for x, y in workload.batches(POOL)]

    def run(call: int) -> jax.Array:
        nonlocal weights, state
        weights, state, loss = compiled(weights, state, *batches[call % POOL])
        return loss.block_until_ready()

    return Runner(run)


def infer(workload: Workload, size: int) -> Runner:
    network, weights = NETWORKS[workload.name], _weights(workload)
    compiled = jax.jit(lambda x: network(weights, x))
    inputs = [x.numpy() for x, _ in workload.batches(POOL, size)]
    return Runner(lambda call: compiled(inputs[call % POOL]).block_until_ready())


def _weights(workload: Workload) -> Weights:
    return [jnp.asarray(p.detach().numpy()) for p in workload.network().parameters()]
