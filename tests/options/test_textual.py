"""Options from files and from JSON: what is read, what is refused, and that no code runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import poptorch
from poptorch import ConnectionType, OutputMode

GOOD = """deviceIterations(1)
setExecutionStrategy(poptorch.ShardedExecution())
  replicationFactor(1)

enableSyntheticData(True) # note
# a comment
"""


def write(folder, text, name="tmp.conf"):
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_is_applied_line_by_line_and_the_model_runs(tmp_path):
    options = poptorch.Options().engine("eager")
    assert options.loadFromFile(str(write(tmp_path, GOOD))) is options
    assert isinstance(options._execution_strategy, poptorch.ShardedExecution)
    assert options._Popart.options["syntheticDataMode"] == 2
    assert poptorch.inferenceModel(torch.nn.Linear(2, 2), options)(torch.ones(2)).shape == (2,)


def test_a_syntax_error_names_the_kept_line_and_changes_nothing(tmp_path):
    path = write(tmp_path, GOOD.replace("(1)", "(9)") + "anchorMode(poptorch.AnchorMode.Sum\n")
    options = poptorch.Options()
    with pytest.raises(poptorch.ConfigFileError) as caught:
        options.loadFromFile(path)
    text = str(caught.value)
    assert "SyntaxError at line 5 of tmp.conf" in text
    assert "\n> options.anchorMode(poptorch.AnchorMode.Sum" in text
    assert repr(options) == repr(poptorch.Options())


def test_files_accumulate_and_the_last_one_wins(tmp_path):
    one = write(tmp_path, "deviceIterations(2)\nreplicationFactor(2)\nenableSyntheticData(True)\n", "a.conf")
    two = write(tmp_path, "deviceIterations(1)\n", "b.conf")
    options = poptorch.Options().engine("eager").loadFromFile(one).loadFromFile(two)
    executor = poptorch.inferenceModel(torch.nn.ReLU(), options)
    assert (executor.options.replication_factor, executor.options.device_iterations) == (2, 1)
    assert executor(torch.ones(2)).shape == (2,)


LINES = [
    ("Training.gradientAccumulation(8)", lambda o: o.Training.gradient_accumulation == 8),
    ("outputMode(poptorch.OutputMode.EveryN, output_return_period=3)", lambda o: o.output_return_period == 3),
    ("Precision.setPartialsType(torch.half)", lambda o: o._Popart.options["partialsTypeMatMuls"] == "half"),
    ("deviceIterations(2).replicationFactor(3)", lambda o: (o.device_iterations, o.replication_factor) == (2, 3)),
    ("randomSeed(-5)", lambda o: o.random_seed == -5),
    ("setAvailableMemoryProportion({'IPU0': 0.5})", lambda o: o.available_memory_proportion == {0: 0.5}),
    (
        "_Popart.set('hardwareInstrumentations', {0, 1})",
        lambda o: o._Popart.options["hardwareInstrumentations"] == {0, 1},
    ),
    ("_Popart.set('dotChecks', ['FINAL'])", lambda o: o._Popart.options["dotChecks"] == ["FINAL"]),
    (
        "setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage('a').ipu(1), ('b',)))",
        lambda o: o._execution_strategy.stage("a").ipu_id == 1,
    ),
    (
        "TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))",
        lambda o: o.TensorLocations.location_weight == {"onChip": 0},
    ),
]


@pytest.mark.parametrize(("line", "holds"), LINES, ids=[line for line, _ in LINES])
def test_a_line_is_a_call_as_in_python(line, holds, tmp_path):
    assert holds(poptorch.Options().loadFromFile(write(tmp_path, line)))


FORBIDDEN = [
    "logDir(__import__('os').getcwd())",
    "__class__.__init__(1)",
    "_values.update({'device_iterations': 3})",
    "deviceIterations([x for x in (1,)][0])",
    "deviceIterations((lambda: 3)())",
    "setAvailableMemoryProportion({**{'IPU0': 0.1}})",
    "set(**{'device_iterations': 3})",
    "deviceIterations(open)",
    "deviceIterations(-'a')",
    "device_iterations",
    "device_iterations = 3",
    "logDir('\0')",
]


@pytest.mark.parametrize("line", FORBIDDEN)
def test_nothing_but_setters_with_plain_values_is_carried_out(line, tmp_path):
    options = poptorch.Options()
    with pytest.raises(poptorch.ConfigFileError, match=r"line 1 of tmp\.conf"):
        options.loadFromFile(write(tmp_path, line))
    assert repr(options) == repr(poptorch.Options())


OTHER_ERRORS = [
    ("deviceIteration(2)", AttributeError, "did you mean 'deviceIterations'"),
    ("deviceIterations('2')", AssertionError, "deviceIterations"),
    ("setExecutionStrategy(poptorch.ShardedExecutions())", AttributeError, "did you mean 'ShardedExecution'"),
    ("outputMode(poptorch.OutputMode.Al)", AttributeError, "Al"),
    ("setExecutionStrategy(poptorch)", AttributeError, "not the module itself"),
    ("Precision.setPartialsType(torch.nn)", AttributeError, "torch.nn"),
]


@pytest.mark.parametrize(("line", "error", "text"), OTHER_ERRORS)
def test_other_mistakes_keep_their_type_and_earlier_lines_stay(line, error, text, tmp_path):
    options = poptorch.Options()
    with pytest.raises(error, match=text):
        options.loadFromFile(write(tmp_path, f"replicationFactor(2)\n{line}\n"))
    assert options.replication_factor == 2


def test_a_missing_file_is_the_error_of_python():
    with pytest.raises(FileNotFoundError):
        poptorch.Options().loadFromFile("no such file")


def test_a_file_that_loads_itself_is_refused(tmp_path):
    path = write(tmp_path, f"deviceIterations(2)\nloadFromFile({str(tmp_path / 'tmp.conf')!r})\n")
    options = poptorch.Options()
    with pytest.raises(poptorch.ConfigFileError, match=r"tmp\.conf loads itself.*tmp\.conf → tmp\.conf"):
        options.loadFromFile(path)
    assert options.device_iterations == 2


def test_files_that_load_each_other_are_refused_with_the_way(tmp_path):
    names = [str(tmp_path / name) for name in ("a", "b", "c")]
    for name, following in zip(names, [names[1], names[2], names[1]], strict=True):
        Path(name).write_text(f"loadFromFile({following!r})\n")
    with pytest.raises(poptorch.ConfigFileError, match=r"b loads itself.*: b → c → b"):
        poptorch.Options().loadFromFile(names[0])


def test_a_link_to_the_file_itself_is_found_out(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "tmp.conf")
    with pytest.raises(poptorch.ConfigFileError, match="loads itself"):
        poptorch.Options().loadFromFile(write(tmp_path, f"loadFromFile({str(tmp_path / 'link')!r})\n"))


def test_a_file_may_load_another_one_more_than_once(tmp_path):
    other = tmp_path / "other"
    other.write_text("replicationFactor(3)\n")
    path = write(tmp_path, f"loadFromFile({str(other)!r})\nreplicationFactor(2)\nloadFromFile({str(other)!r})\n")
    assert poptorch.Options().loadFromFile(path).loadFromFile(path).replication_factor == 3


def test_a_file_is_utf_8_with_or_without_a_mark(tmp_path):
    path = tmp_path / "tmp.conf"
    path.write_bytes("modelName('Größe')\n".encode("utf-8-sig"))
    assert poptorch.Options().loadFromFile(path).model_name == "Größe"
    path.write_bytes("modelName('Größe')\n".encode("latin-1"))
    with pytest.raises(poptorch.ConfigFileError, match=r"tmp\.conf is not text in UTF-8"):
        poptorch.Options().loadFromFile(path)


def test_json_calls_setters_in_order():
    options = poptorch.Options()
    text = json.dumps(
        {
            "deviceIterations": 2,
            "Precision.enableFloatingPointExceptions": True,
            "connectionType": "ConnectionType.OnDemand",
            "_Popart.set": ["saveInitializersToFile", "my_file.onnx"],
            "logDir": "not.an.Enum",
            "outputMode": ["OutputMode.EveryN", 2],
        }
    )
    assert options.from_json(text) is options
    assert options.device_iterations == 2
    assert options._Popart.options["enableFloatingPointChecks"] is True
    assert options.connection_type is ConnectionType.OnDemand
    assert options._Popart.options["saveInitializersToFile"] == "my_file.onnx"
    assert options.log_dir == "not.an.Enum"
    assert (options.output_mode, options.output_return_period) == (OutputMode.EveryN, 2)


@pytest.mark.parametrize(
    ("text", "error", "fragment"),
    [
        ('{"deviceIteration": 2}', AttributeError, "did you mean 'deviceIterations'"),
        ('{"Trainin.gradientAccumulation": 2}', AttributeError, "did you mean 'Training'"),
        ('{"device_iterations": 2}', AttributeError, "not a method"),
        ('{"__init__": []}', AttributeError, "private"),
        ('{"_values.clear": []}', AttributeError, "private"),
        ('{"deviceIterations": "2"}', AssertionError, "deviceIterations"),
        ("{deviceIterations: 2}", json.JSONDecodeError, "property name"),
        ("[1]", json.JSONDecodeError, "not a JSON object"),
    ],
)
def test_bad_json_is_refused(text, error, fragment):
    with pytest.raises(error, match=fragment):
        poptorch.Options().from_json(text)


def test_the_environment_gives_default_options(monkeypatch):
    plain = poptorch.Options()
    explicit = poptorch.Options().deviceIterations(2).replicationFactor(1).logDir("X").enableSyntheticData(True)
    value = {"deviceIterations": 2, "replicationFactor": 1, "logDir": "X", "enableSyntheticData": True}
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", json.dumps(value))
    assert repr(poptorch.Options()) == repr(explicit) != repr(plain)


def test_the_environment_reaches_groups_and_wins_over_the_cache_variable(monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "one")
    monkeypatch.setenv(
        "POPTORCH_DEFAULT_OPTIONS",
        '{"Precision.enableFloatingPointExceptions": true, "enableExecutableCaching": "two"}',
    )
    options = poptorch.Options()
    assert options._Popart.options["enableFloatingPointChecks"] is True
    assert options._Popart.options["cachePath"] == "two"


def test_a_broken_variable_is_named(monkeypatch):
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", "{nonsense")
    with pytest.raises(json.JSONDecodeError, match="POPTORCH_DEFAULT_OPTIONS"):
        poptorch.Options()
