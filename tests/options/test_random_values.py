"""Whatever is given to an option, it is taken or refused with a documented error: at once, or when compiling."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import poptorch
from poptorch import enums
from poptorch.options import popart_keys, resolve, validate
from poptorch.options.reference import GROUPS

SETTERS = [(prefix, name) for prefix, group in GROUPS.items() for name in group._definitions]
MEMBERS = [
    item for kind in vars(enums).values() if isinstance(kind, type) and hasattr(kind, "__members__") for item in kind
]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 200),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["IPU0", "IPUx", "a", "eager"]),
    st.sampled_from(MEMBERS),
    st.sampled_from([torch.half, torch.float32, torch.int64]),
    st.builds(object),
    st.builds(poptorch.TensorLocationSettings),
    st.builds(poptorch.ShardedExecution),
)
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.tuples(scalars),
    st.dictionaries(
        st.one_of(st.text(max_size=3), st.sampled_from(["IPU0", "IPU1"]), st.integers()), scalars, max_size=3
    ),
)
DOCUMENTED = (poptorch.Error, AssertionError, ValueError)


def compile_would(options):
    """The checks between setting options and running a model."""
    resolve(options, training=True)
    validate(options._resolved(poptorch.OutputMode.Final).toDict())


@pytest.mark.parametrize(("prefix", "name"), SETTERS, ids=[prefix + name for prefix, name in SETTERS])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_setters_never_fail_otherwise(prefix, name, data):
    options = poptorch.Options()
    setter = getattr(getattr(options, prefix[:-1]) if prefix else options, name)
    parameters = [p for p in inspect.signature(setter).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p for p in parameters if p.default is p.empty]
    count = data.draw(st.integers(len(required), len(parameters)))
    arguments = [data.draw(values) for _ in range(count)]
    try:
        setter(*arguments)
        compile_would(options)
    except DOCUMENTED:
        return
    assert repr(options.clone()) == repr(options)


@settings(max_examples=150, deadline=None)
@given(
    key=st.one_of(st.text(max_size=8), st.sampled_from(sorted(popart_keys.BOOL | popart_keys.INT | popart_keys.MAP))),
    value=values,
)
def test_settings_of_the_graph_compiler_never_fail_otherwise(key, value):
    options = poptorch.Options()
    options._Popart.set(key, value)
    try:
        compile_would(options)
    except DOCUMENTED:
        return
    assert repr(options.clone()) == repr(options)


@settings(max_examples=150, deadline=None)
@given(key=st.sampled_from(sorted(poptorch.Options._declared())), value=values)
def test_assignments_never_fail_otherwise(key, value):
    options = poptorch.Options()
    try:
        setattr(options, key, value)
        compile_would(options)
    except DOCUMENTED:
        return
    assert options(key) == value
