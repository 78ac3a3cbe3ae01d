"""IPUs for PyTorch Lightning: `Trainer(accelerator="ipu")`.

Importing this makes the accelerator known to `lightning` and to `pytorch_lightning`. The classes here belong to the
package that the program has imported already, or else to `lightning`.
"""

from functools import partial

from poptorch.late_imports import run_after_import
from poptorch.lightning.arguments import Family
from poptorch.lightning.family import for_package
from poptorch.lightning.installation import install, install_legacy_api, register, uninstall
from poptorch.lightning.module import LightningIPUModule
from poptorch.lightning.packages import ROOTS, preferred

_family: Family = for_package(preferred())

IPUAccelerator = _family.IPUAccelerator
IPUPlugin = _family.IPUPlugin
IPUPrecision = _family.IPUPrecision
IPUPrecisionPlugin = _family.IPUPrecisionPlugin
IPUStrategy = _family.IPUStrategy
Trainer = _family.Trainer

for _name in ROOTS:
    run_after_import(ROOTS[_name], partial(install, _name))

__all__ = [
    "IPUAccelerator",
    "IPUPlugin",
    "IPUPrecision",
    "IPUPrecisionPlugin",
    "IPUStrategy",
    "LightningIPUModule",
    "Trainer",
    "for_package",
    "install_legacy_api",
    "register",
    "uninstall",
]
